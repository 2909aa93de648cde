"""What can be asked for in a cluster: the vendors' schemes, and what one of every other countable resource is worth.

Built-in rows, and those that the operator adds in further keys of the quota ConfigMap::

    gpu_units:   {nvidia.com/gpu.shared: {cards: 0.25}, deviceclass/rdma.example.com: {}}   # {}: worth nothing
    gpu_schemes: {hami: {resources: {count: nvidia.com/vgpu}}}                              # see `scheme_settings`
    gpu_domains: [acme.com, example.com/gpu-*]                                              # GPU vendors of their own
    gpu_models:  {A100: [NVIDIA-A100-*GB]}                                                  # see `card_models`
"""

import functools
import itertools
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from vcuda.k8s_types import can_be_name
from vcuda.quota.model import CORES_PER_CARD, Allowance, Charge
from vcuda.requests.schemes import SCHEMES, Scheme
from vcuda.requests.share_limits import ShareLimits

CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""How a pod asks for a device of a class without a claim (KEP-5004): the resource's name ends in that of the class."""
CLASS = "deviceclass/"
"""How a class is named in the units table."""

WHOLE_CARD = Charge(CORES_PER_CARD, 0, CORES_PER_CARD)
NOTHING = Charge()

PLAIN_CARDS = "nvidia.com/gpu"
"""The resource of NVIDIA's own device plugin: whole cards, where no scheme has the name."""

# Classes of the three DRA drivers (deployments/helm of each), and what is no GPU in the domain of a vendor. A share
# that is asked for without its capacity is a whole card: so is one of a class of shares, asked for by the class's name.
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
            "nvidia.com/priority",  # HAMi's task priority, no device (pkg/device/nvidia/device.go, ResourcePriority)
            "deviceclass/compute-domain-daemon.nvidia.com",
            "deviceclass/compute-domain-default-channel.nvidia.com",
        ),
        NOTHING,
    ),
}

NOT_FIXED: Mapping[str, str] = dict.fromkeys(
    ("deviceclass/mig.nvidia.com", "deviceclass/mig-manager"),
    "what one is worth depends on its MIG profile; ask for nvidia.com/mig-<profile>, or by a ResourceClaim",
)
"""Units that a number alone says too little of, and what to write instead."""

VENDORS = (
    *dict.fromkeys(scheme.vendor_domain for scheme in SCHEMES),
    "amd.com",
    "gpu.intel.com",
    "habana.ai",
    "tke.cloud.tencent.com/qgpu-*",
    "volcano.sh/vgpu-*",
    "huawei.com/Ascend*",
    "huawei.com/npu*",
    "aliyun.com/gpu-*",
    "alibabacloud.com/ppu*",
    "aws.amazon.com/neuron*",
    "k8s.amazonaws.com/vgpu*",
    "baidu.com/cgpu*",
    "baidu.com/gpu*",
    "birentech.com",
    "cambricon.com",
    "elasticgpu.io",
    "enflame.com",
    "furiosa.ai",
    "google.com/tpu*",
    "graphcore.ai",
    "hygon.com",
    "iluvatar.ai",
    "iluvatar.com",
    "koordinator.sh/gpu*",
    "kunlunxin.com",
    "metax-tech.com",
    "microsoft.com/directx*",
    "mthreads.com",
    "qualcomm.com/qaic*",
    "rebellions.ai",
    "tenstorrent.com",
    "vastaitech.com",
    "vke.volcengine.com/mgpu-*",
)
"""The domains of accelerator vendors. If a domain has other resources too: the beginning of the accelerators' names."""

_NAME = re.compile(r"[A-Za-z0-9](?:[-._A-Za-z0-9]{0,61}[A-Za-z0-9])?", re.ASCII)
# Of NVIDIA's device plugin, with MIG strategy "mixed": what stands behind the memory are media extensions and the like.
_MIG = re.compile(r"nvidia\.com/mig-([1-7])g\.([1-9][0-9]{0,3})gb(?:\.[a-z]+)*", re.ASCII)
_MIG_SLICES = 7
PROFILE = "nvidia.com/mig-"
LONGEST = 253 + len("/") + 63
"""Characters of a resource's name: a domain's and those behind it."""


MAX_PRODUCT = 64
"""Characters of a product's name: those of an attribute of a device; a label's value has at most 63."""
WILDCARDS = frozenset("*?")

# The last two are what Unicode, and so RE2, takes for a k and an s in another case.
_FOLD = str.maketrans(string.ascii_uppercase + " \u212a\u017f", string.ascii_lowercase + "-ks")


def fold(name: str) -> str:
    """Return a product's name, or a pattern of names, as it is compared."""
    return name.translate(_FOLD)


def matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return what tells whether a folded name is one of these folded patterns."""
    return re.compile("|".join(map(_regex_of, patterns))).fullmatch


def _regex_of(pattern: str) -> str:
    # What stands between two `*` is looked for once, from the left: to try each place it has would take a time that
    # grows with a power of the name's length, and names come from pods too.
    first, *others = pattern.split("*")
    inner = "".join(f"(?>.*?{_literal(part)})" for part in others[:-1] if part)
    return _literal(first) + (f"{inner}.*{_literal(others[-1])}" if others else "")


def _literal(text: str) -> str:
    return "".join("." if each == "?" else re.escape(each) for each in text)


class ProductRow(msgspec.Struct, frozen=True):
    """The patterns of a model's products, as written, and the cores that one whole device of its nodes is worth."""

    products: tuple[str, ...] = ()
    cores: int = CORES_PER_CARD


class CardModels(msgspec.Struct, frozen=True, dict=True):
    """The rows by model; ``CardModels()`` names none, and every product is a model by its own name."""

    rows: Mapping[str, ProductRow] = {}

    @functools.cached_property
    def _find(self) -> Callable[[str], re.Match[str] | None]:
        # One pattern for all: a pod may select by thousands of values, each of which is looked up.
        rows = ((model, *row.products) for model, row in self.rows.items())
        patterns = ("|".join(_regex_of(fold(name)) for name in names) for names in rows)
        return re.compile("|".join(f"({pattern})" for pattern in patterns)).fullmatch

    def model_of(self, product: str) -> str:
        """Return the model that a product is of: a node's label has its name, or a device."""
        if not self.rows or len(product) > MAX_PRODUCT:
            return product
        found = self._find(fold(product))
        return next(itertools.islice(self.rows, (found.lastindex or 1) - 1, None)) if found else product

    def label_values(self, model: str, seen: Iterable[str] = ()) -> tuple[str, ...]:
        """Return values of a node's label that are a model: its name, those ``seen``, and what its row has in full.

        A value that only a pattern stands for, and that no node has, cannot be told beforehand.
        """
        products = (each.replace(" ", "-") for each in self.rows.get(model, ProductRow()).products)
        known = sorted({*seen, *filter(_NAME.fullmatch, products)})
        return tuple(dict.fromkeys([model, *known]))

    @functools.cached_property
    def cores(self) -> Mapping[str, int]:
        """What one whole device is worth on nodes of a model, where that is less than a card."""
        return {model: row.cores for model, row in self.rows.items() if row.cores != CORES_PER_CARD}


NO_ROWS = CardModels()


def _pattern_of(domain: str) -> str:
    # Of a whole domain those of its subdomains too; of a part the resources whose names begin so.
    name, _, prefix = domain.partition("/")
    if prefix:
        return f"{re.escape(name)}/{re.escape(prefix.removesuffix('*'))}"
    return rf"(?:[^/]*\.)?{re.escape(name)}/"


class GpuResources(msgspec.Struct, frozen=True, dict=True):
    """Everything that pods of one cluster can ask for GPUs by; ``GpuResources()`` is what is built in.

    ``own_units``, ``own_vendors`` and ``models`` are the operator's. ``version`` is the resourceVersion of the
    ConfigMap that says so: what was counted by an older one may be worth something else by now, or of another model.
    """

    schemes: tuple[Scheme, ...] = SCHEMES
    own_units: Mapping[str, Charge] = {}
    own_vendors: tuple[str, ...] = ()
    version: str = ""
    models: CardModels = NO_ROWS

    @functools.cached_property
    def scheduler_users(self) -> frozenset[str]:
        """The users that the schemes' own schedulers are."""
        return frozenset(user for scheme in self.schemes for user in scheme.scheduler_users)

    @functools.cached_property
    def limits_without_scheme(self) -> tuple[ShareLimits, ...]:
        """The libraries that may limit a share by a unit or a ResourceClaim: neither names the vendor."""
        return tuple(dict.fromkeys(each.limits for each in self.schemes if not each.limits.needs_scheme))

    @functools.cached_property
    def switches(self) -> ShareLimits:
        """The variables of all schemes that turn off all limits."""
        return self._variables_with(Allowance.DISABLE_CONTROL)

    @functools.cached_property
    def core_policies(self) -> ShareLimits:
        """The variables of all schemes that turn off the core limit."""
        return self._variables_with(Allowance.CORE_POLICY)

    def _variables_with(self, allowance: Allowance) -> ShareLimits:
        variables = (variable for scheme in self.schemes for variable in scheme.limits.variables)
        return ShareLimits(tuple(each for each in variables if each.allowance is allowance))

    # Made once, since every pod of the cluster is looked up in them.
    @functools.cached_property
    def scheme_of(self) -> Mapping[str, Scheme]:
        """Which scheme a container's resource belongs to."""
        return {resource: scheme for scheme in self.schemes for resource in scheme.resources}

    @functools.cached_property
    def vendors(self) -> re.Pattern[str]:
        """Matches the beginning of a resource that may well be a GPU where no table has it."""
        # One pattern: a pod may have tens of thousands of resources, and each is looked at.
        patterns = map(_pattern_of, (*VENDORS, *self.own_vendors))
        return re.compile("|".join(patterns), re.ASCII | re.IGNORECASE)

    def unit_of(self, resource: str) -> Charge | None:
        """Return what one of a resource is worth that belongs to no scheme; None where no table has it."""
        name = unit_name(resource)
        worth = self.own_units.get(name) or BUILT_IN_UNITS.get(name)
        return worth or (worth_of_profile(name) if name.startswith(PROFILE) else None)

    def counts(self, resource: str) -> bool:
        """Return whether whoever asks for this resource is charged."""
        return resource in self.scheme_of or self.unit_of(resource) not in (None, NOTHING)

    def is_unknown_gpu(self, resource: str) -> bool:
        """Return whether this may well be a GPU, and no table says what it is worth."""
        # One that is longer can be no resource: the API server refuses it (IsQualifiedName).
        if len(resource) > LONGEST or resource in self.scheme_of or self.unit_of(resource) is not None:
            return False
        return resource.startswith(CLASS_RESOURCE) or self.vendors.match(resource) is not None

    def counts_like(self, other: "GpuResources") -> bool:
        """Return whether every pod is charged the same by both, and to the same model."""
        mine, theirs = ((each.schemes, each.own_units, each.models) for each in (self, other))
        return self is other or mine == theirs

    def with_claimed(self, extended: Collection[str]) -> "GpuResources":
        """Return the same where the scheduler claims devices for these resources: one of such a resource is whole."""
        # Which node has a device plugin and which a driver is not known before the pod is placed.
        if PLAIN_CARDS not in extended or not self.models.cores:
            return self
        rows = {model: ProductRow(row.products) for model, row in self.models.rows.items()}
        return msgspec.structs.replace(self, models=CardModels(rows))


BUILT_IN = GpuResources()


def is_resource(name: str) -> bool:
    """Return whether an extended resource can have this name: one with a domain (apimachinery, IsQualifiedName)."""
    domain, _, rest = name.partition("/")
    return can_be_name(domain) and _NAME.fullmatch(rest) is not None


def unit_name(resource: str) -> str:
    """Return the name of a container's resource in the units table."""
    return CLASS + resource.removeprefix(CLASS_RESOURCE) if resource.startswith(CLASS_RESOURCE) else resource


def worth_of_profile(name: str) -> Charge | None:
    """Return what one slice of a MIG profile is worth; None for any other resource."""
    profile = _MIG.fullmatch(name)
    if not profile:
        return None
    return Charge(CORES_PER_CARD * int(profile[1]) // _MIG_SLICES, int(profile[2]) * 1024)
