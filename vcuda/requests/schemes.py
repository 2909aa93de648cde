"""The vendors of GPU software. A `Scheme` has the names of one vendor's resources, annotations, labels and files.

docs/recipes.md has the steps to add a vendor.

Sources: tkestack/gpu-manager and gpu-admission (``pkg/api``, ``pkg/util/types.go``), their nvidia.com fork,
Project-HAMi/HAMi (``pkg/util/types.go``, ``pkg/device/nvidia``), coldzerofear/vgpu-manager (``pkg/util/consts.go``).
Sources of the directories: gpu-manager ``pkg/services/virtual-manager``, HAMi's NVIDIA device plugin
(``$HOOK_PATH/containers/<pod uid>_<container>``), vgpu-manager (``/etc/vgpu-manager/<pod uid>_<container>``).
"""

import re
from collections.abc import Iterable

import msgspec

from vcuda.requests.share_limits import HAMI_CORE, VCUDA_CONTROLLER, VGPU_MANAGER_LIBRARY, ShareLimits

NANOSECONDS, SECONDS = 1_000_000_000, 1
"""The units of Unix times in annotations, each as the number of these units in a second."""

UID, CONTAINER = "{uid}", "{container}"
"""Placeholders in the name of a pod's directory on a node: for the uid of the pod, and for the name of a container."""


class AllocationPhase(msgspec.Struct, frozen=True):
    """The annotation or label in which a vendor records the phase of a pod's allocation, with the value for each phase.
    A phase that the vendor does not record has the value None."""

    key: str
    done: str
    """The value that the device plugin writes when the pod has got its cards."""
    placed: str | None = None
    """The value that the scheduler writes when it has chosen a node for the pod."""
    allocating: str | None = None
    """The value that is written while the pod is being bound to its node."""


class PodDirectory(msgspec.Struct, frozen=True):
    """The directories on a node in which a vendor's device plugin stores files for the pods of the node."""

    root: str
    name: str = UID
    """The pattern of the name of a pod's directory in ``root``. It contains `UID` once, and may contain `CONTAINER`."""


class Scheme(msgspec.Struct, frozen=True):
    """The names by which pods request one vendor's cards, and by which the vendor's components record allocations.

    In a tuple of annotations or labels, a name that ends in ``-`` stands for every key that begins with it.
    """

    name: str
    """The name of the vendor's scheme in flags, in metrics, and in key ``gpu_schemes`` of the quota ConfigMap."""
    display_name: str
    """The name of the vendor's software, as people write it."""
    vendor_domain: str
    """The domain of the vendor's resources. If a pod requests a resource of this domain, and the charge is unknown, the
    pod is rejected. If the domain has other resources too, this is a pattern of the GPU resources only."""

    # Resources that pods request
    cores: str
    """The resource by which pods request cores of the vendor's cards. 100 cores are one card."""
    memory: str
    """The resource by which pods request memory of the vendor's cards."""
    memory_unit: int = 1
    """The MiB in one unit of the resource ``memory``."""
    count: str | None = None
    """The resource for the number of vGPUs; None if the vendor has no such resource. If ``count`` is set, ``cores`` and
    ``memory`` are the amounts of each vGPU, and a vGPU without cores is charged all cores of a card."""
    counts_plain_cards: bool = False
    """True if NVIDIA's own device plugin also has the resource ``count``. For this plugin, one unit is a whole card."""
    memory_percentage: str | None = None
    """The resource for memory as a percentage of the card's memory; None if the vendor has no such resource."""
    cores_by_memory: bool = False
    """True if a share without cores is charged cores in proportion to its memory; False if it is charged all cores.
    Only ``gpu_schemes`` of the quota ConfigMap sets this field, for schemes with ``count``."""

    # Annotations, and a label, that users write on a pod
    core_limit: str | None = None
    """The annotation that sets an upper limit for the cores that a share may use."""
    wanted_models: str | None = None
    """The annotation in which a pod lists the types of card that it accepts."""
    unwanted_models: str | None = None
    """The annotation in which a pod lists the types of card that it does not accept."""
    card_mode: str | None = None
    """The annotation by which a pod chooses how a card is shared; None if the vendor's cards are never in MIG mode."""
    shared_mode: str = ""
    """The value of annotation ``card_mode`` for a share of a card that is not in MIG mode."""

    opt_out: tuple[str, str] | None = None
    """The label (key and value) by which the owner of a pod makes the vendor's webhook ignore the pod."""

    # Annotations and labels that the vendor's components write on a pod
    allocation_annotations: tuple[str, ...] = ()
    """The annotations that the vendor's scheduler and device plugin write on pods."""
    allocation_labels: tuple[str, ...] = ()
    """The labels that the vendor's scheduler and device plugin write on pods."""
    creation_annotations: tuple[str, ...] = ()
    """The annotations that the vendor's webhook writes on a pod that it changes. If a new pod already has one of them,
    the pod is a copy of another pod."""
    predicate_node: str | None = None
    """The pod annotation that names the node that the vendor's scheduler chose."""
    predicate_times: tuple[str, ...] = ()
    """The annotations with the Unix time at which the scheduler chose the node. The newest of these times counts."""
    time_unit: int = SECONDS
    """The unit of the times in the annotations ``predicate_times``."""
    phase: AllocationPhase | None = None
    card_index: str | None = None
    """The key, without the container's index at its end, of the pod annotation that lists a container's card numbers.
    If a scheme has this annotation, this project's scheduler extender assigns the cards to the scheme's pods."""
    allocated: str | None = None
    """The annotation of a pod that lists the pod's cards by uuid."""

    # Annotations that the vendor's components write on a node
    node_lock: str | None = None
    """The annotation that locks a node, so that only one pod at a time gets its cards there."""
    register: str | None = None
    """The annotation in which the vendor lists the cards of a node."""
    handshake: str | None = None
    """The node annotation in which the scheduler asks whether the device plugin is alive, and the plugin answers."""
    pod_directory: PodDirectory | None = None
    """The directories in which the vendor stores files for pods on a node. The node agent cleans them up."""

    # Facts about the vendor's components
    sets_visible_devices: bool = False
    """True if the device plugin sets NVIDIA_VISIBLE_DEVICES in a container that requests `main_resource`."""
    scheduler: str | None = None
    """The scheduler of pods that request the vendor's cards; None for the scheduler in ``--scheduler-name``. Key
    ``gpu_schemes`` of the quota ConfigMap sets this field."""
    scheduler_users: tuple[str, ...] = ()
    """The user names of the vendor's scheduler, which creates claims for pods that request an extended resource."""
    limits: ShareLimits = ShareLimits()
    """The variables and files by which the vendor's library limits a share of a card in a container."""

    @property
    def resources(self) -> tuple[str, ...]:
        names = (self.count, self.cores, self.memory, self.memory_percentage)
        return tuple(name for name in names if name)

    @property
    def main_resource(self) -> str:
        """The resource that the vendor's device plugin serves. A container must request it to get a card."""
        return self.count or self.cores


def _gpu_manager(name: str, display_name: str, vendor_domain: str, domain: str, memory_unit: int = 1) -> Scheme:
    """Return the scheme of gpu-manager or of a fork. ``domain``: the domain of its resources and annotations."""
    return Scheme(
        name=name,
        display_name=display_name,
        vendor_domain=vendor_domain,
        cores=f"{domain}/vcuda-core",
        memory=f"{domain}/vcuda-memory",
        memory_unit=memory_unit,
        core_limit=f"{domain}/vcuda-core-limit",
        allocation_annotations=(
            f"{domain}/predicate-time",
            f"{domain}/predicate-node",
            f"{domain}/predicate-gpu-idx-",
            f"{domain}/gpu-assigned",
        ),
        predicate_node=f"{domain}/predicate-node",
        predicate_times=(f"{domain}/predicate-time",),
        time_unit=NANOSECONDS,
        phase=AllocationPhase(f"{domain}/gpu-assigned", done="true", placed="false"),
        card_index=f"{domain}/predicate-gpu-idx-",
        pod_directory=PodDirectory("/etc/gpu-manager/vm"),
        sets_visible_devices=True,
        limits=VCUDA_CONTROLLER,
    )


# gpu-manager counts memory in blocks of 256 MiB. All other schemes count memory in MiB.
GPU_MANAGER = _gpu_manager("gpu-manager", "gpu-manager", "tencent.com/vcuda-*", "tencent.com", memory_unit=256)
NVIDIA_VCUDA = msgspec.structs.replace(
    _gpu_manager("nvidia-vcuda", "gpu-manager's nvidia.com fork", "nvidia.com", "nvidia.com"),
    wanted_models="nvidia.com/use-gputype",
    unwanted_models="nvidia.com/nouse-gputype",
)

HAMI = Scheme(
    name="hami",
    display_name="HAMi",
    vendor_domain="nvidia.com",
    count="nvidia.com/gpu",
    counts_plain_cards=True,  # one nvidia.com/gpu is a vGPU of HAMi, or a whole card of NVIDIA's device plugin
    cores="nvidia.com/gpucores",
    memory="nvidia.com/gpumem",
    memory_percentage="nvidia.com/gpumem-percentage",
    wanted_models="nvidia.com/use-gputype",
    unwanted_models="nvidia.com/nouse-gputype",
    card_mode="nvidia.com/vgpu-mode",
    shared_mode="hami-core",
    opt_out=("hami.io/webhook", "ignore"),
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
    handshake="hami.io/node-handshake",
    allocated="hami.io/vgpu-devices-allocated",
    pod_directory=PodDirectory("/usr/local/vgpu/containers", f"{UID}_{CONTAINER}"),
    sets_visible_devices=True,
    limits=HAMI_CORE,
)

VGPU_MANAGER = Scheme(
    name="vgpu-manager",
    display_name="vgpu-manager",
    vendor_domain="nvidia.com",
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
    pod_directory=PodDirectory("/etc/vgpu-manager", f"{UID}_{CONTAINER}"),
    sets_visible_devices=True,
    limits=VGPU_MANAGER_LIBRARY,
)

# The order of the schemes matters. If a pod has an annotation that two schemes use, and requests neither scheme, the
# annotation is attributed to the scheme that is listed first.
SCHEMES: tuple[Scheme, ...] = (GPU_MANAGER, NVIDIA_VCUDA, HAMI, VGPU_MANAGER)


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) + (".*" if name.endswith("-") else "") for name in names), re.DOTALL)


CREATION_ANNOTATIONS = _any_of(
    name for scheme in SCHEMES for name in (*scheme.allocation_annotations, *scheme.creation_annotations)
)
"""A pattern for the keys of annotations that only vendors' components write. The webhook removes them from new pods."""

ALLOCATION_ANNOTATIONS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_annotations)
ALLOCATION_LABELS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_labels)
"""Patterns for the keys of annotations and labels that the scheduler or device plugin of any vendor writes."""


def is_listed_key(key: str, names: tuple[str, ...]) -> bool:
    """Return whether an annotation or label is one of ``names``, or begins with a name that ends in ``-``."""
    return any(key == name or (name.endswith("-") and key.startswith(name)) for name in names)
