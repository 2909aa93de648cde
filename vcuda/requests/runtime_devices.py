"""Finds the devices that a container runtime gives a container because of variables, annotations or the RuntimeClass.

The rules are those of NVIDIA/nvidia-container-toolkit: ``internal/config/image/cuda_image.go``,
``internal/modifier/cdi.go``, ``internal/info/auto.go`` and ``cmd/nvidia-container-runtime-hook/container_config.go``.
The runtimes of other vendors follow the same design, each with its own variable.
"""

import functools
from collections.abc import Callable, Collection, Iterable

import msgspec

from vcuda.k8s_types import EnvVar
from vcuda.requests import resources

GPU_RUNTIME_CLASSES = ("nvidia", "nvidia-*", "kata-*nvidia-gpu*")
"""Patterns of the RuntimeClasses and handlers that NVIDIA's GPU operator, container toolkit and kata-deploy create.
NVIDIA/gpu-operator ``assets/pre-requisites`` has the classes nvidia, nvidia-cdi and nvidia-legacy.
NVIDIA/nvidia-container-toolkit has handlers of these names and nvidia-experimental. kata-containers/kata-containers
``tools/packaging/kata-deploy/runtimeclasses`` has kata-qemu-nvidia-gpu, and that name with -snp, -tdx and -nvcf.
Project-HAMi/HAMi ``charts/hami`` makes a class of any name with the handler nvidia."""


class RuntimeClasses(msgspec.Struct, frozen=True, dict=True):
    """Finds out whether a RuntimeClass makes the container runtime give GPUs to a pod."""

    patterns: tuple[str, ...] = GPU_RUNTIME_CLASSES
    """Patterns of names of RuntimeClasses or handlers. ``*`` stands for any text, ``?`` for one character."""
    handler_of: Callable[[str], str | None] = lambda _name: None
    """A function that returns the handler of the RuntimeClass with this name; None if the handler is unknown."""

    def gives_gpus(self, name: str) -> bool:
        return bool(self._matches(name) or self._matches(self.handler_of(name) or ""))

    @functools.cached_property
    def _matches(self) -> Callable[[str], object]:
        return resources.matcher(map(str.lower, self.patterns))


VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"

NO_DEVICES = ("none", "void")
"""The values of NVIDIA_VISIBLE_DEVICES that give no card. Runtimes of other vendors give no device for these values
either. AMD's runtime (ROCm/container-toolkit ``internal/oci/oci.go``) ignores unknown words. Ascend's runtime
(Ascend/ascend-docker-runtime) accepts ``void``, and fails for ``none``."""

# The variables in `DEVICE_VARIABLES` give a container devices by these runtimes and hooks:
# NVIDIA/nvidia-container-toolkit, ROCm/container-toolkit, HabanaAI/habana-container-runtime,
# Ascend/ascend-docker-runtime, MooreThreads' mthreads container toolkit, and the toolkits of MetaX, Cambricon,
# Iluvatar, Enflame, Kunlunxin (CXPU), Biren, Vastai, Hygon and AWS Neuron. Variables for frameworks, such as
# CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES, can only hide devices that a container already has. So they
# are not listed.
DEVICE_VARIABLES = frozenset(
    f"{vendor}_VISIBLE_DEVICES"
    for vendor in (
        "NVIDIA",
        "AMD",
        "ASCEND",
        "AWS_NEURON",
        "BIREN",
        "CAMBRICON",
        "CXPU",
        "DCU",
        "ENFLAME",
        "HABANA",
        "HYGON",
        "ILUVATAR",
        "IX",
        "METAX",
        "MTHREADS",
        "VASTAI",
    )
)

CUDA_VERSION = "CUDA_VERSION"
"""The variable that makes an image a legacy CUDA image. In a legacy image, an unset NVIDIA_VISIBLE_DEVICES means all
cards (`IsLegacy`)."""

MIG_CONTROL = ("NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES")
"""With these variables and CAP_SYS_ADMIN, a container gets the MIG control files of all cards (`getMigDevices`)."""

# The other variables of NVIDIA's toolkit give no card. NVIDIA_DRIVER_CAPABILITIES chooses the driver's libraries. The
# NVIDIA_REQUIRE_ variables and NVIDIA_DISABLE_REQUIRE are constraints on the driver's version. NVIDIA_IMEX_CHANNELS,
# NVIDIA_GDS, NVIDIA_MOFED, NVIDIA_GDRCOPY and NVIDIA_NVSWITCH give other device files. The setting
# `swarm-resource` in the toolkit's configuration on a node can give NVIDIA_VISIBLE_DEVICES another name. The API server
# does not know this name.
GIVING_VARIABLES = DEVICE_VARIABLES | {CUDA_VERSION, *MIG_CONTROL}
"""The variables by which a container may get a device that it does not request."""

DEVICE_ANNOTATIONS = (
    "nvidia.cdi.k8s.io",  # NVIDIA/nvidia-container-toolkit cmd/nvidia-ctk-installer/container/runtime/nri/plugin.go
    "cdi.k8s.io",  # container-device-interface pkg/cdi/annotations.go; Kata Containers reads it from pods
    "cdi.nri.io",  # containers/nri-plugins, the plugin of pull request 327
    "cdi-devices.noderesource.dev",  # containerd/nri plugins/device-injector, as the next five
    "cdi-devices.nri.io",
    "devices.noderesource.dev",
    "devices.nri.io",
    "mounts.noderesource.dev",
    "mounts.nri.io",
    "devices.gke.io",  # GoogleCloudPlatform/container-engine-accelerators nri_device_injector
)
"""The domains of the annotations by which a plugin of the container runtime (NRI or CDI) gives a pod devices or mounts
that it does not request. A slash and further text may follow the domain, for example container.NAME."""


def gives_devices(variable: EnvVar) -> bool:
    """Return whether a variable may give devices to a container. If its value is unknown (valueFrom), it may."""
    if variable.name in MIG_CONTROL:
        return variable.known_value != ""
    return variable.name in DEVICE_VARIABLES and variable.known_value not in NO_DEVICES


def makes_legacy_image(variable: EnvVar) -> bool:
    """Return whether a variable gives a container all cards of its node, unless NVIDIA_VISIBLE_DEVICES hides them."""
    return variable.name == CUDA_VERSION and variable.known_value != ""


def hides_cards(variables: Iterable[EnvVar]) -> bool:
    """Return whether the ``variables`` of one container make NVIDIA's runtime give the container no card."""
    # If two variables have the same name, kubelet uses the last one.
    last = {variable.name: variable.known_value for variable in variables}
    return last.get(VISIBLE_DEVICES) in NO_DEVICES


# In a CUDA image (`CUDA_VERSION`), NVIDIA's runtime gives all cards to a container without NVIDIA_VISIBLE_DEVICES. A
# container that requests cards is not affected, because the device plugin or DRA driver sets NVIDIA_VISIBLE_DEVICES:
#
#   gpu-manager                 sets it (tkestack/gpu-manager pkg/services/allocator/nvidia/allocator.go, `allocateOne`)
#   NVIDIA's (strategy envvar)  sets it (NVIDIA/k8s-device-plugin internal/plugin/server.go, `getAllocateResponse`)
#   NVIDIA's (strategy mounts)  sets it to the mounts' directory (the same file, `updateResponseForDeviceMounts`)
#   NVIDIA's (strategy CDI)     its CDI specification sets it to void (nvidia-container-toolkit pkg/nvcdi/wrapper.go)
#   HAMi's                      as NVIDIA's (HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go)
#   vgpu-manager's              as NVIDIA's (coldzerofear/vgpu-manager pkg/deviceplugin/vgpu/vnum_plugin.go)
#   DRA drivers                 their CDI specifications set it to void (k8s-dra-driver-gpu
#                               cmd/gpu-kubelet-plugin/cdi.go), but a ResourceClaim in a pod does not name its driver
#
# So a container with only a ResourceClaim must itself set NVIDIA_VISIBLE_DEVICES to void. It still gets its cards,
# because they are CDI devices.
def is_covered(requested: Collection[str], known: resources.GpuResources) -> bool:
    """Return whether a device plugin sets NVIDIA_VISIBLE_DEVICES in a container that requests these resources."""
    for name in requested:
        if scheme := known.scheme_of.get(name):
            if scheme.sets_visible_devices and name == scheme.main_resource:
                return True
        elif known.counts(name) and name.startswith(("nvidia.com/", resources.CLASS_RESOURCE)):
            return True
    return False
