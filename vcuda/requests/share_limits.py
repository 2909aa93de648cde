"""Describes how each vendor limits a share of a card inside its container, and how a pod could bypass these limits.

A device plugin passes the limits to a library in the container by environment variables and mounted files. kubelet
appends the container's own ``env`` and ``volumeMounts`` to those of the device plugin (``GenerateRunContainerOptions``
in kubernetes pkg/kubelet/kubelet_pods.go). If two entries have the same name or path, the container's own entry takes
effect. So a pod must not set a variable that the device plugin sets or the library reads, unless the value is known to
lift no limit. With a CDI device, the driver's variables take effect (``ContainerEdits.Apply`` in
container-device-interface). But a pod can still set variables that the driver does not set.

``LD_PRELOAD`` is admitted, because it only adds to ``/etc/ld.so.preload``. Three things are not checked: ``envFrom``,
the image with its variables and links, and a command that sets variables for programs that it starts.
"""

import functools
import posixpath
import re
from collections.abc import Callable, Iterable

import msgspec

from vcuda.quota.allowances import Allowance

PRELOAD = "/etc/ld.so.preload"
"""The file by which the dynamic linker loads the library of HAMi or vgpu-manager into every program of a container."""

TMP = "/tmp"  # noqa: S108  # this is a directory in a container

VCUDA_LIBRARY = "/usr/local/nvidia"
"""The directory in which gpu-manager mounts the driver's libraries, with gpu-manager's own libcuda.so."""


class LimitVariable(msgspec.Struct, frozen=True, eq=False):
    """A rule for environment variables that set or lift a limit of a share of a card."""

    pattern: str
    """The pattern of the variables' names. ``*`` stands for any text, such as the number of a card."""
    allowance: Allowance
    """The item of ``allow`` in a quota that permits pods to set the variables."""
    is_harmless: Callable[[str], bool] = lambda _value: False
    """A function that returns True for a value with which the variable lifts no limit."""
    harmless: str = ""
    """A description of the values with which the variable lifts no limit; empty if there are no such values."""
    mirrors: str = ""
    """The resource whose amount the vendor's own webhook writes into the variable. A pod may set this amount itself."""
    is_common: bool = False
    """True if containers without a GPU also use a variable of this name, for other purposes."""


class ShareLimits(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The variables and files by which one vendor's library limits a container to its share of a card."""

    variables: tuple[LimitVariable, ...] = ()
    paths: tuple[str, ...] = ()
    """The paths in a container at which the library and its limits are mounted."""
    needs_scheme: bool = False
    """True if the library limits only shares requested by the scheme's resources, not by units or ResourceClaims."""

    def covers(self, mount_path: str) -> bool:
        """Return whether a mount in a container replaces one of ``paths``, or allows another container to replace it.

        Runtimes mount deeper paths later, so a volume at a parent directory does not hide a path. But another container
        with the same volume can delete the mount point, and so the mount. This risk is accepted only for /tmp, because
        many pods mount /tmp, and vendors have only lock files there.
        """
        # kubelet makes a mount path absolute (`MakeAbsolutePath`), and container runtimes clean it (`filepath.Clean`).
        mounted = posixpath.normpath("/" + mount_path.lstrip("/"))
        return any(
            mounted == path
            or mounted.startswith(f"{path}/")
            or (mounted != TMP and path.startswith(f"{mounted.rstrip('/')}/"))
            for path in self.paths
        )

    def find(self, name: str) -> LimitVariable | None:
        found = self._find(name) if self.variables else None
        return self.variables[(found.lastindex or 1) - 1] if found else None

    @functools.cached_property
    def _find(self) -> Callable[[str], re.Match[str] | None]:
        # All rules are joined in one pattern for speed, because a pod may have thousands of environment variables.
        patterns = (".*".join(map(re.escape, each.pattern.split("*"))) for each in self.variables)
        return re.compile("|".join(f"({pattern})" for pattern in patterns)).fullmatch


def _all(allowance: Allowance, *patterns: str) -> Iterable[LimitVariable]:
    return (LimitVariable(pattern, allowance) for pattern in patterns)


def _numbered(allowance: Allowance, *names: str) -> Iterable[LimitVariable]:
    """Return rules for variables with these names, alone or with ``_`` and the number of a card after the name."""
    return _all(allowance, *(pattern for name in names for pattern in (name, f"{name}_*")))


def _keeps_core_limit(policy: str) -> bool:
    return policy.strip().casefold() in ("", "default", "force")


def _starts_in_vcuda_library(path: str) -> bool:
    # The dynamic linker loads the first libcuda.so.1 in LD_LIBRARY_PATH. So gpu-manager's directory must be the first.
    # Its path must be literal, because kubelet replaces $(NAME) in a value by the value of another variable.
    return path.partition(":")[0].rstrip("/") in (f"{VCUDA_LIBRARY}/lib", f"{VCUDA_LIBRARY}/lib64")


def _is_false(value: str) -> bool:
    return value.casefold() in ("", "false")


# gpu-manager (tkestack/gpu-manager pkg/services/allocator/nvidia/allocator.go, `allocateOne`) sets LD_LIBRARY_PATH,
# depending on the container's variable compat32, and mounts both ``paths``. The library (tkestack/vcuda-controller
# src/loader.c, `read_controller_configuration`) reads the limits from /etc/vcuda. The only variable that it reads is
# LOGGER_LEVEL. gpu-manager also sets NVIDIA_VISIBLE_DEVICES, so nvidia-container-runtime would also mount the original
# libcuda.so. Without LD_LIBRARY_PATH, the linker would find the original.
VCUDA_CONTROLLER = ShareLimits(
    variables=(
        LimitVariable(
            "LD_LIBRARY_PATH",
            Allowance.LIMIT_LIBRARY,
            _starts_in_vcuda_library,
            f"a path that begins with {VCUDA_LIBRARY}/lib64",
            is_common=True,
        ),
        LimitVariable("compat32", Allowance.LIMIT_LIBRARY, _is_false, "false", is_common=True),
    ),
    paths=(VCUDA_LIBRARY, "/etc/vcuda"),
    needs_scheme=True,
)

# HAMi's device plugin (Project-HAMi/HAMi pkg/device-plugin/nvidiadevice/nvinternal/plugin/server.go, `Allocate`) sets
# the _LIMIT variables, the _CACHE variable and CUDA_OVERSUBSCRIBE, and mounts ``paths``. The plugin omits the preload
# file for some values of CUDA_DISABLE_CONTROL, which differ between releases. HAMi's library (Project-HAMi/HAMi-core
# src/multiprocess/multiprocess_memory_limit.c) reads the _LIMIT variables, ACTIVE_OOM_KILLER, CUDA_TASK_PRIORITY and
# GPU_CORE_UTILIZATION_POLICY. It also reads the cache file, in which other processes find the limits, and variables in
# file /overrideEnv. CUDA_REDIRECT names the library from which src/libvgpu.c takes its hooks. HAMi's own webhook writes
# CUDA_TASK_PRIORITY from the resource nvidia.com/priority (pkg/device/nvidia/device.go, `MutateAdmission`).
# LIBCUDA_LOG_LEVEL and RECORD_KERNEL_INTERVAL limit nothing. CUDA_VISIBLE_DEVICES can only hide devices.
HAMI_CORE = ShareLimits(
    variables=(
        LimitVariable("CUDA_DISABLE_CONTROL", Allowance.DISABLE_CONTROL),
        LimitVariable("GPU_CORE_UTILIZATION_POLICY", Allowance.CORE_POLICY, _keeps_core_limit, "default or force"),
        LimitVariable("CUDA_TASK_PRIORITY", Allowance.CORE_LIMIT, mirrors="nvidia.com/priority"),
        *_numbered(Allowance.CORE_LIMIT, "CUDA_DEVICE_SM_LIMIT"),
        *_numbered(Allowance.MEMORY_LIMIT, "CUDA_DEVICE_MEMORY_LIMIT"),
        *_all(Allowance.MEMORY_LIMIT, "CUDA_OVERSUBSCRIBE", "ACTIVE_OOM_KILLER"),
        *_all(Allowance.LIMIT_LIBRARY, "CUDA_DEVICE_MEMORY_SHARED_CACHE", "CUDA_REDIRECT"),
    ),
    paths=(PRELOAD, "/usr/local/vgpu", "/overrideEnv"),
)

# vgpu-manager's device plugin (coldzerofear/vgpu-manager pkg/deviceplugin/vgpu/vnum_plugin.go, `Allocate`) sets the
# variables of pkg/util/consts.go and mounts the paths. The plugin omits the preload file if the container sets
# DISABLE_VGPU_CONTROL, and reads the container's CUDA_MEM_OVERSOLD. The DRA driver does the same for claims
# (pkg/kubeletplugin/vgpu.go). If a configuration file is missing, the library (library/src/loader.c, util.c) reads the
# variables instead. Older releases have GPU_DEVICES_UUID, CUDA_MEMORY_RATIO, CUDA_MEMORY_OVERSUBSCRIBE and
# ENV_COMPATIBILITY_MODE. CUDA_SM_SHARED_BUCKET can give each process its own full share of cores. The other CUDA_SM_
# variables tune how fast the core limit acts. By the VGPU_ variables the library finds the limits that apply.
# LOGGER_LEVEL limits nothing.
VGPU_MANAGER_LIBRARY = ShareLimits(
    variables=(
        LimitVariable("DISABLE_VGPU_CONTROL", Allowance.DISABLE_CONTROL),
        *_numbered(Allowance.CORE_LIMIT, "CUDA_CORE_LIMIT", "CUDA_CORE_SOFT_LIMIT"),
        *_all(Allowance.CORE_LIMIT, "CUDA_SM_*", "EXTERNAL_SM_WATCHER_ENABLED"),
        *_numbered(Allowance.MEMORY_LIMIT, "CUDA_MEM_LIMIT", "CUDA_MEM_RATIO", "CUDA_MEM_OVERSOLD"),
        *_all(Allowance.MEMORY_LIMIT, "CUDA_MEMORY_RATIO", "CUDA_MEMORY_OVERSUBSCRIBE", "VMEMORY_NODE_ENABLED"),
        *_numbered(Allowance.LIMIT_LIBRARY, "MANAGER_VISIBLE_DEVICE", "MANAGER_VISIBLE_DEVICES"),
        *_all(
            Allowance.LIMIT_LIBRARY,
            "MANAGER_COMPATIBILITY_MODE",
            "MANAGER_CLIENT_REGISTER_UUID",
            "MANAGER_VGPU_CLAIM_UID",
            "GPU_DEVICES_UUID",
            "ENV_COMPATIBILITY_MODE",
            "VGPU_POD_*",
            "VGPU_CONTAINER_NAME",
            "VGPU_CONFIG_*",
            "VGPU_REMOTE_MODE",
        ),
    ),
    paths=(PRELOAD, "/etc/vgpu-manager", f"{TMP}/.vgpu_lock", f"{TMP}/.vmem_node", f"{TMP}/.sm_node"),
)
