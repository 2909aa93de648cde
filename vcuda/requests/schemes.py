"""The vendors: the names by which pods request each vendor's cards, and by which its components record allocations.

To add a vendor:

1. Add a `Scheme` and add it to `SCHEMES`. Leave out the fields that the vendor has no name for. Take the names from the
   vendor's source code, and add the source to the list at the end of this docstring.
2. If the vendor's library reads variables or files in a container, describe them in `share_limits` and set ``limits``.
3. Add its annotations and labels to the policy ``allocations.quota.vcuda.io`` in manifests/base/policies.yaml. A test
   in tests/unit/test_schemes.py lists those that are missing.
4. If a node register or a list of a pod's cards has a new format, extend vcuda/placement/registers.py or
   vcuda/allocations/given_cards.py.
5. If the vendor has a DRA driver, add it to ``DRIVERS`` in vcuda/claims/drivers.py and its DeviceClasses to
   ``BUILT_IN_UNITS`` in vcuda/requests/resources.py.
6. Name the vendor in CHANGELOG.md, and generate docs/reference.md (``make reference``).

Everything else follows from the row: charges, refusals, the garbage collection, the node agent, and the test pods.

Sources: tkestack/gpu-manager and gpu-admission (``pkg/api``, ``pkg/util/types.go``), their nvidia.com fork,
Project-HAMi/HAMi (``pkg/util/types.go``, ``pkg/device/nvidia``), coldzerofear/vgpu-manager (``pkg/util/consts.go``).
The directories: gpu-manager ``pkg/services/virtual-manager``, HAMi's NVIDIA device plugin
(``$HOOK_PATH/containers/<pod uid>_<container>``), vgpu-manager (``/etc/vgpu-manager/<pod uid>_<container>``).
"""

import re
from collections.abc import Iterable

import msgspec

from vcuda.requests.share_limits import HAMI_CORE, VCUDA_CONTROLLER, VGPU_MANAGER_LIBRARY, ShareLimits

NANOSECONDS, SECONDS = 1_000_000_000, 1
"""Units of the Unix time in an annotation, as their number in a second."""

UID, CONTAINER = "{uid}", "{container}"
"""Placeholders in the name of a pod's directory: the pod's uid and the name of a container."""


class AllocationPhase(msgspec.Struct, frozen=True):
    """The annotation or label of an allocation's phase, and its values; None if the vendor does not write one."""

    key: str
    done: str
    """Written by the device plugin when the pod has its cards."""
    placed: str | None = None
    """Written by the scheduler when it chooses a node."""
    allocating: str | None = None
    """Written while the pod is being bound."""


class OptOut(msgspec.Struct, frozen=True):
    """The label by which the owner of a pod keeps the vendor's webhook away from it."""

    key: str
    value: str


class PodDirectory(msgspec.Struct, frozen=True):
    """The directories that a device plugin keeps on a node for each pod."""

    root: str
    name: str = UID
    """The name of one directory in ``root``; it contains `UID` once, and may contain `CONTAINER`."""
    own_socket: str = ""
    """The name of a socket on which the device plugin itself listens, in a directory and one level below, until the
    directory is gone. Such a listener is no use by the pod. Source for gpu-manager: runVDeviceServer and vDeviceWatcher
    in pkg/services/virtual-manager/manager.go."""


class Scheme(msgspec.Struct, frozen=True):
    """The names by which one vendor's cards are requested and its allocations are recorded.

    In a tuple of annotations or labels, a name that ends in ``-`` stands for every key that begins with it.
    """

    name: str
    """The name in flags, metrics and ``gpu_schemes``."""
    display_name: str
    """The name of the software, for people."""
    vendor_domain: str
    """The domain of the vendor's resources. A pod is refused if it requests a resource of the domain that has no value.
    If the domain also has resources that are no accelerators: the beginning of the accelerators' names, then ``*``."""

    # Resources
    cores: str
    """The resource for cores: 100 are one card."""
    memory: str
    """The resource for memory."""
    memory_unit: int = 1
    """MiB in one ``memory``."""
    count: str | None = None
    """The resource for the number of vGPUs. If set, cores and memory are per vGPU; without cores a vGPU is a card."""
    counts_plain_cards: bool = False
    """Whether NVIDIA's own device plugin also uses ``count``, for whole cards."""
    memory_percentage: str | None = None
    """The resource for memory as a percentage of the card's."""
    cores_by_memory: bool = False
    """Whether a share without cores is charged the part of the cores that it has of the card's memory, not all cores.
    Set by ``gpu_schemes``, for schemes with ``count``."""

    # Written on a pod by users
    core_limit: str | None = None
    """The annotation with the upper limit of a share's cores."""
    wanted_models: str | None = None
    """The annotation with the types of card that the pod accepts."""
    unwanted_models: str | None = None
    """The annotation with the types of card that the pod does not accept."""
    card_mode: str | None = None
    """The annotation that says how the card is shared, if cards may be in MIG mode."""
    shared_mode: str = ""
    """The value of ``card_mode`` for a share of a card that is not in MIG mode."""

    opt_out: OptOut | None = None
    """The label of a pod that is not for the vendor's nodes."""

    # Written on a pod by the vendor's components
    allocation_annotations: tuple[str, ...] = ()
    """Written by the scheduler and the device plugin."""
    allocation_labels: tuple[str, ...] = ()
    """Written by the scheduler and the device plugin."""
    creation_annotations: tuple[str, ...] = ()
    """Written by the vendor's webhook on a pod whose request it converts. A new pod with one is a copy."""
    predicate_node: str | None = None
    """The annotation with the chosen node."""
    predicate_times: tuple[str, ...] = ()
    """The annotations with the time of that choice, in Unix time; the newest counts."""
    time_unit: int = SECONDS
    """The unit of ``predicate_times``."""
    phase: AllocationPhase | None = None
    card_index: str | None = None
    """The annotation that lists a container's cards by number; the container's number is appended to it. The extender
    places the pods of a scheme that sets it."""
    allocated: str | None = None
    """The annotation that lists the pod's cards by uuid."""

    # Written on a node by the vendor's components
    node_lock: str | None = None
    """The annotation by which the scheduler and the device plugin take turns on the node."""
    register: str | None = None
    """The annotation with the node's cards."""
    handshake: str | None = None
    """The annotation by which the scheduler asks whether the device plugin is alive, and the plugin answers."""
    counts_cards_by_register: bool = False
    """Whether the node offers no cores, so that only ``register`` says how many cards it has."""
    pod_directory: PodDirectory | None = None
    """The directories that the node agent cleans up."""

    # Done by the vendor's components
    sets_visible_devices: bool = False
    """Whether the device plugin sets NVIDIA_VISIBLE_DEVICES in a container that requests `main_resource`."""
    scheduler: str | None = None
    """The scheduler of the vendor's pods; None: the one of ``--scheduler-name``. Set by ``gpu_schemes``."""
    scheduler_users: tuple[str, ...] = ()
    """The users that this scheduler is. It claims devices for pods that request an extended resource."""
    limits: ShareLimits = ShareLimits()
    """The variables and files by which the vendor's library limits a share in a container."""

    @property
    def resources(self) -> tuple[str, ...]:
        names = (self.count, self.cores, self.memory, self.memory_percentage)
        return tuple(name for name in names if name)

    @property
    def main_resource(self) -> str:
        """The resource that the device plugin serves: only a container that requests it gets a card."""
        return self.count or self.cores

    @property
    def model_choices(self) -> tuple[str, ...]:
        """The annotations by which a pod chooses among types of card or ways to share them."""
        return tuple(name for name in (self.wanted_models, self.unwanted_models, self.card_mode) if name)


def _gpu_manager(name: str, display_name: str, vendor_domain: str, domain: str, memory_unit: int = 1) -> Scheme:
    """Return gpu-manager, or a fork of it, whose resources and annotations are in ``domain``."""
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
        pod_directory=PodDirectory("/etc/gpu-manager/vm", own_socket="vcuda.sock"),
        sets_visible_devices=True,
        limits=VCUDA_CONTROLLER,
    )


# gpu-manager counts memory in blocks of 256 MiB, all others in MiB.
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
    counts_plain_cards=True,  # HAMi's own name for a vGPU is that of NVIDIA's device plugin for a card
    cores="nvidia.com/gpucores",
    memory="nvidia.com/gpumem",
    memory_percentage="nvidia.com/gpumem-percentage",
    wanted_models="nvidia.com/use-gputype",
    unwanted_models="nvidia.com/nouse-gputype",
    card_mode="nvidia.com/vgpu-mode",
    shared_mode="hami-core",
    opt_out=OptOut("hami.io/webhook", "ignore"),
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
    counts_cards_by_register=True,
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

# Two schemes may write the same annotation. If a pod requests cards by neither, it belongs to the first of them.
SCHEMES: tuple[Scheme, ...] = (GPU_MANAGER, NVIDIA_VCUDA, HAMI, VGPU_MANAGER)


def guarded_annotations() -> frozenset[str]:
    """Return the annotations of a stored pod that only schedulers and device plugins may change.

    A name that ends in ``-`` stands for every key that begins with it. The list in policies.yaml has the same names.
    """
    return frozenset(
        name
        for scheme in SCHEMES
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
"""Matches a whole annotation key that must not be on a new pod."""

ALLOCATION_ANNOTATIONS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_annotations)
ALLOCATION_LABELS = _any_of(name for scheme in SCHEMES for name in scheme.allocation_labels)
"""Match a whole key that the scheduler or device plugin of any vendor writes."""


def is_named(key: str, names: tuple[str, ...]) -> bool:
    """Return whether ``key`` is one of ``names``, or begins with one that ends in ``-``."""
    return any(key == name or (name.endswith("-") and key.startswith(name)) for name in names)
