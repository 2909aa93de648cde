"""The ways to ask for vcuda, one row each. To add a vendor is to add a row.

Sources: tkestack/gpu-manager and gpu-admission (``pkg/api``, ``pkg/util/types.go``), their nvidia.com fork,
Project-HAMi/HAMi (``pkg/util/types.go``, ``pkg/device/nvidia``), coldzerofear/vgpu-manager (``pkg/util/consts.go``).
"""

import re
from collections.abc import Iterable

import msgspec

from vcuda.requests.share_limits import HAMI_CORE, VCUDA_CONTROLLER, VGPU_MANAGER_LIBRARY, ShareLimits

NANOSECONDS, SECONDS = 1_000_000_000, 1
"""Units of an annotation's Unix time, as so many in a second."""


class AllocationPhase(msgspec.Struct, frozen=True):
    """How far an allocation has come, as the annotation or label ``key`` tells.

    ``done`` is what the device plugin writes once the cards are the pod's, ``allocating`` what stands there while the
    pod is being bound (None: that is not told).
    """

    key: str
    done: str
    allocating: str | None = None


class Scheme(msgspec.Struct, frozen=True):
    """The names by which one vendor's vcuda is asked for and recorded.

    ``memory_unit`` is in MiB. Where ``count`` is set, cores and memory are per vGPU, and cores that are left out are a
    whole card; ``counts_plain_cards``: the count alone is also how NVIDIA's own device plugin is asked for whole cards.
    ``card_mode`` is the annotation that says how the card may be shared, where a card may be in MIG mode instead.
    ``allocation_annotations`` and ``allocation_labels`` are what its scheduler and device plugin write on a pod; a name
    that ends in ``-`` stands for every key that begins with it. ``creation_annotations`` are what its own webhook
    writes on a pod that it makes into another: one that still asks by the scheme has a copy. Of the annotations,
    ``predicate_node`` holds the node that was chosen, and ``predicate_times`` when that was, in Unix time of
    ``time_unit``; the newest counts.
    ``node_lock`` is the annotation of a node by which its scheduler and device plugin take turns there, ``register``
    that in which the device plugin says what cards the node has; ``allocated`` is the annotation of a pod that names
    those that it was given, by uuid. ``scheduler`` places its pods; None: the one that is set for all. As
    ``scheduler_users`` that scheduler claims devices for pods that ask for them by extended resource. ``limits`` are
    the variables and files by which its library limits a share in the container.
    """

    name: str
    cores: str
    memory: str
    memory_unit: int = 1
    count: str | None = None
    counts_plain_cards: bool = False
    memory_percentage: str | None = None
    core_limit: str | None = None
    wanted_models: str | None = None
    unwanted_models: str | None = None
    card_mode: str | None = None
    allocation_annotations: tuple[str, ...] = ()
    allocation_labels: tuple[str, ...] = ()
    creation_annotations: tuple[str, ...] = ()
    predicate_node: str | None = None
    predicate_times: tuple[str, ...] = ()
    time_unit: int = SECONDS
    phase: AllocationPhase | None = None
    node_lock: str | None = None
    register: str | None = None
    allocated: str | None = None
    scheduler: str | None = None
    scheduler_users: tuple[str, ...] = ()
    limits: ShareLimits = ShareLimits()

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource name of the scheme."""
        names = (self.count, self.cores, self.memory, self.memory_percentage)
        return tuple(name for name in names if name)

    @property
    def main_resource(self) -> str:
        """The resource that kubelet asks the device plugin for: only a container that has it gets a card."""
        return self.count or self.cores

    @property
    def model_choices(self) -> tuple[str, ...]:
        """The annotations by which a pod wants some types of card or way to share them, or does not want others."""
        return tuple(name for name in (self.wanted_models, self.unwanted_models, self.card_mode) if name)


def _gpu_admission_annotations(domain: str) -> tuple[str, ...]:
    names = ("predicate-time", "predicate-node", "predicate-gpu-idx-", "gpu-assigned")
    return tuple(f"{domain}/{name}" for name in names)


GPU_MANAGER = Scheme(
    name="gpu-manager",
    cores="tencent.com/vcuda-core",
    memory="tencent.com/vcuda-memory",
    memory_unit=256,  # gpu-manager counts memory in blocks; all others in MiB
    core_limit="tencent.com/vcuda-core-limit",
    allocation_annotations=_gpu_admission_annotations("tencent.com"),
    predicate_node="tencent.com/predicate-node",
    predicate_times=("tencent.com/predicate-time",),
    time_unit=NANOSECONDS,
    phase=AllocationPhase("tencent.com/gpu-assigned", done="true"),
    limits=VCUDA_CONTROLLER,
)

NVIDIA_VCUDA = Scheme(
    name="nvidia-vcuda",
    cores="nvidia.com/vcuda-core",
    memory="nvidia.com/vcuda-memory",
    core_limit="nvidia.com/vcuda-core-limit",
    wanted_models="nvidia.com/use-gputype",
    unwanted_models="nvidia.com/nouse-gputype",
    allocation_annotations=_gpu_admission_annotations("nvidia.com"),
    predicate_node="nvidia.com/predicate-node",
    predicate_times=("nvidia.com/predicate-time",),
    time_unit=NANOSECONDS,
    phase=AllocationPhase("nvidia.com/gpu-assigned", done="true"),
    limits=VCUDA_CONTROLLER,
)

HAMI = Scheme(
    name="hami",
    count="nvidia.com/gpu",
    counts_plain_cards=True,  # HAMi's own name for a vGPU is that of NVIDIA's device plugin for a card
    cores="nvidia.com/gpucores",
    memory="nvidia.com/gpumem",
    memory_percentage="nvidia.com/gpumem-percentage",
    wanted_models="nvidia.com/use-gputype",
    unwanted_models="nvidia.com/nouse-gputype",
    card_mode="nvidia.com/vgpu-mode",
    allocation_annotations=(
        "hami.io/vgpu-node",
        "hami.io/vgpu-time",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/vgpu-devices-allocated",
        "hami.io/vgpu-mig-allocations",
        "hami.io/bind-phase",
        "hami.io/bind-time",
    ),
    allocation_labels=("hami.io/vgpu-node",),
    predicate_node="hami.io/vgpu-node",
    predicate_times=("hami.io/vgpu-time", "hami.io/bind-time"),
    phase=AllocationPhase("hami.io/bind-phase", done="success", allocating="allocating"),
    node_lock="hami.io/mutex.lock",
    register="hami.io/node-nvidia-register",
    allocated="hami.io/vgpu-devices-allocated",
    limits=HAMI_CORE,
)

VGPU_MANAGER = Scheme(
    name="vgpu-manager",
    count="nvidia.com/vgpu-number",
    cores="nvidia.com/vgpu-cores",
    memory="nvidia.com/vgpu-memory",
    wanted_models="nvidia.com/include-gpu-type",
    unwanted_models="nvidia.com/exclude-gpu-type",
    allocation_annotations=(
        "nvidia.com/predicate-node",
        "nvidia.com/predicate-time",
        "nvidia.com/pre-allocated",
        "nvidia.com/real-allocated",
    ),
    creation_annotations=("vgpu-manager.io/original-resources",),
    allocation_labels=("nvidia.com/assigned-phase",),
    predicate_node="nvidia.com/predicate-node",
    predicate_times=("nvidia.com/predicate-time",),
    time_unit=NANOSECONDS,
    phase=AllocationPhase("nvidia.com/assigned-phase", done="succeed", allocating="allocating"),
    register="nvidia.com/node-device-register",
    allocated="nvidia.com/real-allocated",
    limits=VGPU_MANAGER_LIBRARY,
)

# The order decides to which of two schemes an annotation belongs that both write, where a pod asks by neither.
SCHEMES: tuple[Scheme, ...] = (GPU_MANAGER, NVIDIA_VCUDA, HAMI, VGPU_MANAGER)


def guarded_annotations(schemes: Iterable[Scheme] = SCHEMES) -> frozenset[str]:
    """Return the annotations of a pod that only schedulers and device plugins may change; see policies.yaml.

    A name that ends in ``-`` stands for every key that begins with it.
    """
    return frozenset(
        name
        for scheme in schemes
        for name in (
            *scheme.allocation_annotations,
            *scheme.creation_annotations,
            *scheme.model_choices,
            *filter(None, [scheme.core_limit]),
        )
    )


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) + (".*" if name.endswith("-") else "") for name in names), re.DOTALL)


CREATION_ANNOTATIONS = _any_of(
    name for scheme in SCHEMES for name in (*scheme.allocation_annotations, *scheme.creation_annotations)
)
"""Match a whole key that no new pod may carry."""

ALLOCATION_ANNOTATIONS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_annotations)
ALLOCATION_LABELS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_labels)
"""Match a whole key that the scheduler or device plugin of any scheme writes."""


def is_named(key: str, names: tuple[str, ...]) -> bool:
    """Return whether ``key`` is one of ``names``, or begins with one that ends in ``-``."""
    return any(key == name or (name.endswith("-") and key.startswith(name)) for name in names)
