"""The sources that report the GPU cards of a node. Each source reports product names.

The strongest source comes first:

1. the register of HAMi or vgpu-manager, while its device plugin is alive
2. the ResourceSlices of a known DRA driver
3. the labels of GPU feature discovery (NVIDIA/k8s-device-plugin ``internal/lm``). On a node with different cards the
   product in these labels changes, because GPU feature discovery builds it from an unordered map.
4. the labels that clouds and Karpenter write on nodes with GPUs. They count only if no other source names the model.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.claims.devices import WHOLE_TYPES, DeviceOffer, PoolSlice
from vcuda.claims.drivers import DRIVERS, MEMORY
from vcuda.placement.device_plugins import NodeFacts, is_alive
from vcuda.placement.nodes import COUNT_LABEL
from vcuda.placement.registers import ANNOTATIONS, Register, Registers
from vcuda.requests.folding import VENDOR
from vcuda.requests.resources import CardModels
from vcuda.requests.schemes import Scheme

PRODUCT, CARD_MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
"""GPU feature discovery's labels for the product and the MiB of one card. `COUNT_LABEL` has the number of cards."""
INVALID = "-MIG-INVALID"
"""GPU feature discovery ends a product label with this text if MIG devices do not fit the strategy ``single``."""
_PART = re.compile(r"(?:-MIG-.*|-SHARED)$", re.IGNORECASE)
"""Matches the end of a product's name if the devices of the product are parts of a card."""

CLOUD_LABELS = {
    "cloud.google.com/gke-accelerator": "",
    "eks.amazonaws.com/instance-gpu-name": "eks.amazonaws.com/instance-gpu-manufacturer",
    "karpenter.k8s.aws/instance-gpu-name": "karpenter.k8s.aws/instance-gpu-manufacturer",
    "karpenter.azure.com/sku-gpu-name": "karpenter.azure.com/sku-gpu-manufacturer",
}
"""The labels in which GKE, EKS Auto Mode and Karpenter name a node's cards (nvidia-tesla-t4, t4, t4 and T4), each with
the label of the cards' vendor."""

OPERATOR, SLICES, FEATURES, CLOUD = "label", "resourceslices", "gpu-feature-discovery", "cloud-label"
SOURCES = (OPERATOR, *ANNOTATIONS.values(), SLICES, FEATURES, CLOUD)
"""The names of all sources, the strongest first."""

_BLANKS = re.compile(r"[-\s]+")
_VENDORS = re.compile(rf"^(?:{VENDOR})+", re.IGNORECASE)
_NOT_IN_A_LABEL = re.compile(r"[^-_.A-Za-z0-9]+", re.ASCII)
_MAX_LABEL_LENGTH = 63

_MIB = 2**20
MIG_TYPE = "mig"
_GPU_DRIVERS = frozenset(driver.name for driver in DRIVERS)

DriverCards = Mapping[str, Mapping[DeviceOffer, int]]
"""By DRA driver: the different devices that the driver publishes for one node, each with the number of such devices."""

PublishedCards = Mapping[str, DriverCards]
"""By node: the devices that known DRA drivers publish for the node."""


def normalise(name: str) -> str:
    """Return a product name such as ``NVIDIA-A100-SXM4-40GB``; empty if only ``NVIDIA-`` would be left."""
    # NVML and ResourceSlices have names such as `NVIDIA A100-SXM4-40GB`. GPU feature discovery writes `-` for each
    # space. HAMi up to 2.7 adds `NVIDIA-` to every name. Drivers up to 450 leave the vendor out of the name.
    own = _VENDORS.sub("", f"{_BLANKS.sub('-', name).strip('-')}-").strip("-")
    return f"{VENDOR}{own}" if own else ""


def model_of(product: str, named: CardModels) -> str:
    """Return the GPU model of a normalised product.

    If an entry of `gpu_models` in the quota ConfigMap matches the product, the entry determines the model. Otherwise
    the model is the product's name, shortened to a valid label value.
    """
    model = named.model_of(product)
    return model if model in named.rows else _NOT_IN_A_LABEL.sub("-", product)[:_MAX_LABEL_LENGTH].strip("-_.")


def published_cards(slices: Iterable[PoolSlice]) -> PublishedCards:
    """Return the devices in ResourceSlices, by node. Only the newest complete generation of each pool is used."""
    pools: dict[tuple[str, str], dict[int, list[PoolSlice]]] = {}
    for each in slices:
        if each.driver in _GPU_DRIVERS:
            pools.setdefault((each.driver, each.pool), {}).setdefault(each.generation, []).append(each)
    nodes: dict[str, dict[str, Counter[DeviceOffer]]] = {}
    for generations in pools.values():
        whole = (number for number, slices in generations.items() if len(slices) >= slices[0].of_slices)
        for each in generations.get(max(whole, default=-1), ()):
            if each.node:
                counts = nodes.setdefault(each.node, {}).setdefault(each.driver, Counter())
                for offer in each.offers:
                    # Equal devices of a ResourceSlice share one object, so they are compared by identity.
                    counts[offer] += sum(device is offer for device in each.devices.values())
    return {node: dict(sorted(drivers.items())) for node, drivers in nodes.items()}


class SourceCards(msgspec.Struct, frozen=True):
    """The cards of a node as one source reports them."""

    source: str
    cards: Mapping[str, int]
    """By normalised product: the number of cards; 0 if the source does not report the number."""
    memory: int = 0
    """The memory of the smallest card in MiB; 0 if the source does not report it."""


def cards_by_source(
    labels: Mapping[str, str], registers: Registers, facts: NodeFacts, published: DriverCards, schemes: Iterable[Scheme]
) -> Iterator[SourceCards]:
    """Yield the cards of a node as each source reports them, the strongest source first."""
    for scheme in schemes:
        if scheme.register and is_alive(scheme, facts, registers):
            found = _by_register(scheme.name, registers[scheme.name])
            # On a node without cards, HAMi registers an empty list, from which no model follows.
            yield from [found] if found.cards else []
    yield from _by_slices(published)
    product = normalise(labels.get(PRODUCT, ""))
    if product and not product.upper().endswith(INVALID):
        # If the product label names a MIG slice, the count label counts slices. So the number of cards is unknown.
        count = 0 if _PART.search(product) and "-MIG-" in product.upper() else _figure(labels.get(COUNT_LABEL))
        yield SourceCards(FEATURES, {product: count}, _figure(labels.get(CARD_MEMORY)))


def by_cloud(labels: Mapping[str, str]) -> Iterator[SourceCards]:
    """Yield the cards that the label of a cloud names, without their number."""
    for key, vendor in CLOUD_LABELS.items():
        # Clouds write product names in different letter case. NVIDIA's own names have capital letters, such as
        # NVIDIA-L4.
        product = normalise(labels.get(key, "")).upper()
        if product and labels.get(vendor, "nvidia").casefold() == "nvidia":
            yield SourceCards(CLOUD, {product: 0})
            return


def whole_product(product: str) -> str:
    """Return the product name of a whole card, without the end of the name that stands for a part of the card."""
    return _PART.sub("", product)


def _by_register(scheme: str, register: Register) -> SourceCards:
    products = Counter(card.type for card in register)
    memory = min((card.memory for card in register if card.memory), default=0)
    return SourceCards(scheme, sums((normalise(each), count) for each, count in products.items()), memory)


def _by_slices(published: DriverCards) -> Iterator[SourceCards]:
    # Two DRA drivers may publish the same cards of a node, so only the driver with the most cards is used.
    found = [cards for offers in published.values() if (cards := _cards_of(offers)).cards]
    yield from sorted(found, key=lambda each: (-sum(each.cards.values()), *sorted(each.cards)))[:1]


def _cards_of(offers: Mapping[DeviceOffer, int]) -> SourceCards:
    named = [(offer, count) for offer, count in offers.items() if offer.product]
    whole = [(offer, count) for offer, count in named if offer.type in WHOLE_TYPES]
    # If a driver publishes only MIG slices of a node's cards, the number of cards is unknown, so it counts as 0.
    slices = [(offer, 0) for offer, _ in named if offer.type == MIG_TYPE]
    chosen = whole or slices
    memories = [
        int(capacity.value) // _MIB
        for offer, _ in whole
        for name, capacity in offer.capacities
        if name == MEMORY and int(capacity.value)
    ]
    return SourceCards(
        SLICES, sums((normalise(offer.product), count) for offer, count in chosen), min(memories, default=0)
    )


def sums(cards: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Add up the numbers of cards by name. Empty names are left out."""
    found: dict[str, int] = {}
    for product, count in cards:
        if product:
            found[product] = found.get(product, 0) + count
    return found


def _figure(text: str | None) -> int:
    return int(text) if text and len(text) <= len("999999999") and text.isascii() and text.isdigit() else 0
