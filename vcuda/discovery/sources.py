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
from types import MappingProxyType

import msgspec

from vcuda.claims.devices import DeviceOffer, PoolSlice
from vcuda.claims.drivers import DRIVERS, MEMORY
from vcuda.discovery.names import normalise
from vcuda.k8s_types import Node, whole_or_none
from vcuda.placement.nodes import COUNT_LABEL
from vcuda.placement.registers import ANNOTATIONS, Register, Registers
from vcuda.requests.resources import PLAIN_CARDS, GpuResources
from vcuda.requests.schemes import Scheme

DISCOVERED = "quota.vcuda.io/discovered-model"
"""The annotation of a node that records the model label that the controller wrote, and the source of the model."""

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

_MIB = 2**20
_DELETED = "Deleted"
"""HAMi's scheduler begins a handshake annotation with this text if the device plugin does not answer (CheckHealth)."""
MAX_RECORD = 128
"""Maximum number of characters of the annotation `DISCOVERED` that are stored."""

WHOLE_TYPES, MIG_TYPE = ("gpu", "hami-gpu", "vgpu"), "mig"
_GPU_DRIVERS = frozenset(driver.name for driver in DRIVERS)


class NodeFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts about a node's device plugins that are not in the node's labels or readable registers."""

    offered: Mapping[str, int] = MappingProxyType({})
    """The allocatable amounts of the resources by which a GPU can be requested."""
    answers: Mapping[str, bool] = MappingProxyType({})
    """By vendor's scheme: False if its scheduler has marked the node's device plugin as not answering."""
    malformed: tuple[str, ...] = ()
    """The keys of registers (annotations that list the node's cards) that cannot be read."""
    record: str = ""
    """The value of the annotation `DISCOVERED`."""


NO_FACTS = NodeFacts()


def read_facts(node: Node, known: GpuResources, registers: Registers) -> NodeFacts:
    """Return the facts about a node's device plugins. ``registers``: the node's readable registers, by scheme."""
    annotations, allocatable = node.annotations, (node.status and node.status.allocatable) or {}
    offered = {
        name: count
        for name, quantity in allocatable.items()
        if (known.counts(name) or name == PLAIN_CARDS) and (count := whole_or_none(quantity)) is not None
    }
    handshakes = {each.name: annotations.get(each.handshake or "") for each in known.schemes if each.handshake}
    facts = NodeFacts(
        offered,
        {name: not text.startswith(_DELETED) for name, text in handshakes.items() if text},
        tuple(key for key, scheme in ANNOTATIONS.items() if key in annotations and scheme not in registers),
        annotations.get(DISCOVERED, "")[:MAX_RECORD],
    )
    # Most nodes often have no GPU, so their facts are equal. One shared object saves memory.
    return facts if facts != NO_FACTS else NO_FACTS


def is_alive(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    """Return whether the device plugin of this vendor (scheme) serves the node now."""
    offered = facts.offered.get(scheme.main_resource)
    if scheme.register is None:
        return bool(offered)
    # NVIDIA's plugin may offer the same resource as HAMi's plugin. So only the register, the annotation in which HAMi
    # lists the node's cards, shows that HAMi's plugin serves the node.
    if scheme.name not in registers or _is_left_over(scheme, facts, registers):
        return False
    # After a device plugin has ended, kubelet still reports its resource on the node, with the amount 0.
    return facts.answers.get(scheme.name, False) if offered is None else offered > 0


def _is_left_over(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    # HAMi's scheduler may mark a plugin that still serves the node as not answering, and keep the mark
    # (Project-HAMi/HAMi#1839). HAMi's plugin offers several devices a card, and NVIDIA's plugin offers one.
    return not facts.answers.get(scheme.name, True) and _offers_cards(scheme, facts, registers)


def _offers_cards(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    """Return whether the node offers its cards as NVIDIA's plugin does, and not as the register lists them."""
    register = registers.get(scheme.name, ())
    return facts.offered.get(scheme.main_resource) == len(register) != sum(card.count for card in register)


def outdated_registers(known: GpuResources, facts: NodeFacts, registers: Registers) -> frozenset[str]:
    """Return the vendors whose register (annotation) is still on the node, although another device plugin serves it."""
    return frozenset(each.name for each in known.schemes if _is_left_over(each, facts, registers))


def contradictions(known: GpuResources, facts: NodeFacts, registers: Registers) -> Iterator[str]:
    """Yield a message for each vendor whose register does not fit the resources that the node offers.

    The node still counts as a node of the vendor.
    """
    for scheme in known.schemes:
        if scheme.name not in facts.answers or not registers.get(scheme.name):
            continue
        name, resource = scheme.display_name, scheme.main_resource
        offered, cards = facts.offered.get(resource, 0), len(registers[scheme.name])
        remove = f"If {name} does not run on the node, remove annotation {scheme.register}"
        if not facts.answers[scheme.name] and offered and not _is_left_over(scheme, facts, registers):
            state = f"annotation {scheme.handshake} says that the device plugin of {name} does not answer"
            yield f"{state}, but the node offers {offered} {resource}. {remove}, otherwise {scheme.handshake}"
        elif facts.answers[scheme.name] and offered and _offers_cards(scheme, facts, registers):
            parts = sum(card.count for card in registers[scheme.name])
            listed = f"the register of {name} lists {cards} cards of {parts} {resource}"
            yield f"{listed}, but the node offers {offered}. {remove}"


DriverCards = Mapping[str, Mapping[DeviceOffer, int]]
"""By DRA driver: the different devices that the driver publishes for one node, each with the number of such devices."""

PublishedCards = Mapping[str, DriverCards]
"""By node: the devices that known DRA drivers publish for the node."""


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
    labels: Mapping[str, str],
    registers: Registers,
    facts: NodeFacts,
    published: DriverCards,
    schemes: Iterable[Scheme],
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
        # Clouds differ in letter case, and the names of NVIDIA's products have capital letters: NVIDIA-L4.
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
