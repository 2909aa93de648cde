"""The resources by which pods request GPUs.

A scheme is the set of one vendor's resources. A unit is a resource that belongs to no scheme. Schemes and some
units are built in. The operator adds or changes resources by these keys of the quota ConfigMap::

    gpu_units:   {nvidia.com/gpu.shared: {cards: 0.25}, deviceclass/rdma.example.com: {}}   # {}: not a GPU
    gpu_schemes: {hami: {resources: {count: nvidia.com/vgpu}}}                              # see `scheme_settings`
    gpu_models:  {A100: [NVIDIA-A100-*GB]}                                                  # see `card_models`
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vcuda.k8s_types import can_be_name
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import CORES_PER_CARD, Charge
from vcuda.requests.accelerators import ACCELERATOR
from vcuda.requests.folding import VENDOR, fold, spellings
from vcuda.requests.mig import PROFILE, MigCharges, MigModel, read_profile
from vcuda.requests.schemes import SCHEMES, Scheme
from vcuda.requests.share_limits import ShareLimits

CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""The text before a DeviceClass's name in the resource by which a pod requests a device without a claim (KEP-5004)."""
CLASS = "deviceclass/"
"""The text that precedes the name of a DeviceClass in key ``gpu_units`` of the quota ConfigMap."""

WHOLE_CARD = Charge(CORES_PER_CARD, 0, CORES_PER_CARD)
NOTHING = Charge()

PLAIN_CARDS = "nvidia.com/gpu"
"""The resource of NVIDIA's own device plugin. One unit is a whole card, unless a vendor's scheme has this resource."""

# The built-in units are the DeviceClasses of the three supported DRA drivers (deployments/helm of each driver), and
# vendors' resources that are not GPUs. A pod that requests a share by the extended resource of a DeviceClass cannot
# state the capacity of the share. So DeviceClasses for shares are charged whole cards, like a claim without a capacity.
BUILT_IN_UNITS: Mapping[str, Charge] = {
    **dict.fromkeys(
        (
            PLAIN_CARDS,
            "deviceclass/gpu.nvidia.com",
            "deviceclass/vfio.gpu.nvidia.com",
            "deviceclass/hami-core-gpu.project-hami.io",
            "deviceclass/vgpu-manager",
            "deviceclass/gpu-manager",
            "deviceclass/vfio-manager",
        ),
        WHOLE_CARD,
    ),
    **dict.fromkeys(
        (
            "nvidia.com/hostdev",
            "nvidia.com/priority",  # HAMi's task priority, not a device (pkg/device/nvidia/device.go, ResourcePriority)
            "deviceclass/compute-domain-daemon.nvidia.com",
            "deviceclass/compute-domain-default-channel.nvidia.com",
        ),
        NOTHING,
    ),
}

SHARED_CLASSES = frozenset({"deviceclass/gpu.nvidia.com", "deviceclass/gpu-manager"})
"""The DeviceClasses whose row in ``gpu_units`` is the charge of a card that any number of claims may share."""

NOT_FIXED: Mapping[str, str] = dict.fromkeys(
    ("deviceclass/mig.nvidia.com", "deviceclass/mig-manager"),
    "the charge depends on the MIG profile. Request nvidia.com/mig-<profile>, or use a ResourceClaim",
)
"""The DeviceClasses without a fixed charge, with the message for pods that request one by an extended resource."""

_NAME = re.compile(r"[A-Za-z0-9](?:[-._A-Za-z0-9]{0,61}[A-Za-z0-9])?", re.ASCII)
LONGEST = 253 + len("/") + 63
"""The maximum length of a resource's name, which consists of a domain, a slash and a name."""


MAX_PRODUCT = 64
"""The maximum length of a product's name. Kubernetes allows 64 characters in an attribute of a DRA device, and 63 in a
label value."""
WILDCARDS = frozenset("*?")
_VENDOR = VENDOR.lower()
MAX_KNOWN_PRODUCTS = 4096
"""The most products whose GPU model is remembered. Longer products than `MAX_PRODUCT` are not remembered."""


def matcher(patterns: Iterable[str]) -> Callable[[str], re.Match[str] | None]:
    """Return a function that tests whether a text matches a pattern, in which ``*`` and ``?`` are wildcards."""
    return re.compile("|".join(map(_regex_of, patterns))).fullmatch


def product_matcher(patterns: Iterable[Iterable[str]]) -> Callable[[str], re.Match[str] | None]:
    """Return a function that tests whether a product matches a pattern. The caller must `fold` product and patterns.

    Each item of ``patterns`` is a group of the match.
    """
    groups = "|".join(f"({'|'.join(map(_regex_of, each))})" for each in patterns)
    # Products are compared without the vendor's name. But a wildcard may stand for this name: `*-L4` matches NVIDIA-L4.
    matches = re.compile(f"(?:{_VENDOR})?(?:{groups})").fullmatch
    return lambda product: matches(_VENDOR + product)


def _regex_of(pattern: str) -> str:
    # Each part of a pattern between two `*` is matched only at its first occurrence. To try every occurrence would take
    # very long for some names, and a user could write such a name into a pod.
    first, *rest = pattern.split("*")
    inner = "".join(f"(?>.*?{_literal(part)})" for part in rest[:-1] if part)
    return _literal(first) + (f"{inner}.*{_literal(rest[-1])}" if rest else "")


def _literal(text: str) -> str:
    return "".join("." if each == "?" else re.escape(each) for each in text)


class ProductRow(MigModel, frozen=True):
    """The entry of one GPU model in key ``gpu_models`` of the quota ConfigMap."""

    cores: int = CORES_PER_CARD
    """The cores (hundredths of a card) of one device, such as one nvidia.com/gpu, on nodes of the model."""


class CardValue(NamedTuple):
    """The cores and memory of one device of a GPU model, from which the charge of a pod on this model is computed."""

    cores: int = CORES_PER_CARD
    memory: int = 0


RegisteredCards = Mapping[tuple[str, str], Collection[int]]
"""The different memory sizes in MiB of the healthy cards that vendors list in registers (node annotations), by scheme
name and GPU model. A register may state no memory."""


class CardModels(msgspec.Struct, frozen=True, dict=True):
    """The entries of ``gpu_models`` by GPU model. If a product matches no entry, its name is the model's name.

    All spellings of a product (see `fold`) have the same model.
    """

    rows: Mapping[str, ProductRow] = {}

    def steps(self, products: int) -> int:
        """Return the steps (function calls) that take as long as `model_of` for this number of products."""
        # A function call takes about as long as the comparison of a product with ten patterns. So it counts as one
        # step.
        return products * self._patterns // 10

    @functools.cached_property
    def _patterns(self) -> int:
        return sum(1 + len(row.products) for row in self.rows.values())

    def model_of(self, product: str) -> str:
        """Return the GPU model of ``product``, the value of a node's model label or of a DRA device's attribute."""
        return self._model_of(product) if self.rows and len(product) <= MAX_PRODUCT else product

    @functools.cached_property
    def _find(self) -> Callable[[str], re.Match[str] | None]:
        # All products are joined in one pattern for speed, because a pod may select nodes by thousands of label values.
        return product_matcher(map(fold, (model, *row.products)) for model, row in self.rows.items())

    @functools.cached_property
    def _model_of(self) -> Callable[[str], str]:
        # The models of some products are remembered, because most pods name the same few products.
        def find(product: str) -> str:
            found = self._find(fold(product))
            return next(itertools.islice(self.rows, (found.lastindex or 1) - 1, None)) if found else product

        return functools.lru_cache(MAX_KNOWN_PRODUCTS)(find)

    def memory_of(self, model: str) -> int:
        """Return the memory of one card of a GPU model in MiB; 0 if ``gpu_models`` does not state it."""
        return self.rows.get(model, ProductRow()).memory

    def label_values(self, model: str, seen: Iterable[str] = ()) -> tuple[str, ...]:
        """Return a model's values in the node label: its name, those ``seen``, and its products without wildcards."""
        products = itertools.chain.from_iterable(map(spellings, self.rows.get(model, ProductRow()).products))
        known = sorted({*seen, *filter(_NAME.fullmatch, products)})
        return tuple(dict.fromkeys([model, *known]))

    @functools.cached_property
    def card_values(self) -> Mapping[str, CardValue]:
        """The cores and memory of one device, for each model whose entry in ``gpu_models`` changes the defaults."""
        values = ((model, CardValue(row.cores, row.memory)) for model, row in self.rows.items())
        return {model: value for model, value in values if value != CardValue()}


NO_ROWS = CardModels()


class GpuResources(msgspec.Struct, frozen=True, dict=True):
    """All resources by which pods of one cluster request GPUs. ``GpuResources()`` has only the built-in resources."""

    schemes: tuple[Scheme, ...] = SCHEMES
    own_units: Mapping[str, Charge] = {}
    """The charge of each unit (resource of no scheme) that the operator added in ``gpu_units``."""
    version: str = ""
    """The resourceVersion of the quota ConfigMap that defines these resources."""
    models: CardModels = NO_ROWS
    """The GPU models that the operator described in ``gpu_models``."""
    registered: Mapping[str, CardValue] = {}
    """The cores and memory of one device, for each GPU model for which the vendors' lists of cards change them."""
    limited: frozenset[str] | None = None
    """The GPU models that the quota document limits; None if no document has been read."""

    @functools.cached_property
    def card_values(self) -> Mapping[str, CardValue]:
        return {**self.models.card_values, **self.registered}

    @functools.cached_property
    def scheduler_users(self) -> frozenset[str]:
        return frozenset(user for scheme in self.schemes for user in scheme.scheduler_users)

    @functools.cached_property
    def limits_without_scheme(self) -> tuple[ShareLimits, ...]:
        """The libraries that may limit a share requested by a ResourceClaim or by a unit (resource of no vendor)."""
        return tuple(dict.fromkeys(each.limits for each in self.schemes if not each.limits.needs_scheme))

    @functools.cached_property
    def variables(self) -> Mapping[Allowance, ShareLimits]:
        """The environment variables by which pods lift limits of shares, by the item of `allow` that permits them."""
        every = [variable for scheme in self.schemes for variable in scheme.limits.variables]
        return {allowance: ShareLimits(tuple(v for v in every if v.allowance is allowance)) for allowance in Allowance}

    # `scheme_of` is cached, because it is used for every pod of the cluster.
    @functools.cached_property
    def scheme_of(self) -> Mapping[str, Scheme]:
        return {resource: scheme for scheme in self.schemes for resource in scheme.resources}

    def unit_of(self, resource: str) -> Charge | None:
        """Return the charge of one unit of a resource that is in no vendor's scheme; None if the charge is unknown.

        The charge of a MIG profile is the largest on any GPU model, or a whole card if the profile is unknown.
        """
        name = unit_name(resource)
        # A pod that requests a card by the extended resource of a DeviceClass may get a card that no other pod shares.
        # So the charge of a shared card in `gpu_units` does not apply.
        own = None if name in SHARED_CLASSES and name != resource else self.own_units.get(name)
        value = own or BUILT_IN_UNITS.get(name)
        if value is None and name.startswith(PROFILE):
            return self.value_of_profile(name.removeprefix(PROFILE)) or WHOLE_CARD
        return value

    def value_of_profile(self, profile: str, model: str | None = None) -> Charge | None:
        """Return the charge of a MIG profile on a GPU model; None if the charge is unknown.

        If ``model`` is None, return the largest charge on any GPU model.
        """
        if model is not None and not self._mig.has_mig(model):
            return None
        name = read_profile(profile)
        for each in (profile.replace("+", "."), name):
            if (own := self.own_units.get(f"{PROFILE}{each}")) is not None:
                return own
        if not name:
            return None
        return self._mig.anywhere(name) if model is None else self._mig.on(name, model)

    def steps(self, resources: Iterable[str]) -> int:
        """Return the steps (function calls) that take as long as `unit_of` for these MIG profiles."""
        # A MIG profile is compared with every kind of card whose slices ``gpu_models`` states.
        cards = len(self._mig.cards)
        return cards * sum(each.startswith(PROFILE) for each in resources) if cards else 0

    @functools.cached_property
    def _mig(self) -> MigCharges:
        return MigCharges(self.models.rows)

    def counts(self, resource: str) -> bool:
        return resource in self.scheme_of or self.unit_of(resource) not in (None, NOTHING)

    def is_unknown_gpu(self, resource: str) -> bool:
        """Return whether a resource is probably a GPU, although this system does not know its charge."""
        # The API server rejects a resource name that is longer than `LONGEST` (IsQualifiedName).
        if len(resource) > LONGEST or resource in self.scheme_of:
            return False
        if resource.startswith(PROFILE):
            return self.value_of_profile(resource.removeprefix(PROFILE)) is None
        if self.unit_of(resource) is not None:
            return False
        return resource.startswith(CLASS_RESOURCE) or ACCELERATOR.match(resource) is not None

    def counts_like(self, other: "GpuResources") -> bool:
        """Return whether ``other`` leads to the same charge as this object for every pod on every GPU model."""
        mine, theirs = ((each.schemes, each.own_units, each.models, each.registered) for each in (self, other))
        return self is other or mine == theirs

    def with_claimed(self, extended: Collection[str]) -> "GpuResources":
        """Return the resources of a cluster whose scheduler makes claims for pods that request ``extended`` resources.
        If nvidia.com/gpu is one of these resources, one nvidia.com/gpu is charged a whole card, as in a claim."""
        # Until a pod is placed, its devices may come from a DRA driver, for which one nvidia.com/gpu is a whole card.
        if PLAIN_CARDS not in extended or all(row.cores == CORES_PER_CARD for row in self.models.rows.values()):
            return self
        rows = {model: replace(row, cores=CORES_PER_CARD) for model, row in self.models.rows.items()}
        return replace(self, models=CardModels(rows))

    def with_registered(self, cards: RegisteredCards) -> "GpuResources":
        """Return the resources of a cluster in whose node registers (annotations) the vendors list these ``cards``.

        On a model with registered cards, a request for only a number of devices is charged whole cards. If a share's
        cores are charged in proportion to its memory, they are computed from the memory of the model's smallest card,
        unless ``gpu_models`` states the memory.
        """
        whole = {scheme.name for scheme in self.schemes if scheme.counts_plain_cards}
        priced = any(scheme.cores_by_memory for scheme in self.schemes)
        usual = self.models.card_values
        card_values = dict(usual)
        for (scheme, model), memories in cards.items():
            row, value = self.models.rows.get(model, ProductRow()), card_values.get(model, CardValue())
            cores = max(value.cores, CORES_PER_CARD) if scheme in whole else value.cores
            smallest = min(filter(None, (value.memory, *memories)), default=0)
            card_values[model] = CardValue(cores, smallest if priced and not row.memory else value.memory)
        changed = {model: value for model, value in card_values.items() if value != usual.get(model, CardValue())}
        return replace(self, registered=changed) if changed else self


BUILT_IN = GpuResources()


def is_resource(name: str) -> bool:
    """Return whether ``name`` may be an extended resource, which needs a domain (apimachinery, IsQualifiedName)."""
    domain, _, rest = name.partition("/")
    return can_be_name(domain) and _NAME.fullmatch(rest) is not None


def unit_name(resource: str) -> str:
    """Return the name that a container's resource has in key ``gpu_units`` of the quota ConfigMap."""
    return CLASS + resource.removeprefix(CLASS_RESOURCE) if resource.startswith(CLASS_RESOURCE) else resource
