"""The known DRA drivers: the types of their devices, how each type is charged, and the DeviceClasses.

Sources: kubernetes-sigs/dra-driver-nvidia-gpu and Project-HAMi/k8s-dra-driver (``deployments/helm``, ``pkg`` for the
slices), coldzerofear/vgpu-manager (``deploy`` and ``pkg/kubeletplugin``).
"""

import enum
from collections.abc import Callable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.quota.model import Charge

CORES, MEMORY = "cores", "memory"
"""The capacities that a share of a card requests: cores in hundredths of a card, and memory in bytes."""


class Kind(enum.Enum):
    """How one device is charged: as a whole card, by its MIG profile, by its requested share, or by a fixed value."""

    WHOLE = enum.auto()
    MIG = enum.auto()
    SHARE = enum.auto()
    UNIT = enum.auto()
    """The charge is the value that ``gpu_units`` of the quota ConfigMap has for the DeviceClass."""


class Driver(msgspec.Struct, frozen=True):
    """A DRA driver."""

    name: str
    kinds: Mapping[str, Kind]
    """How a device is charged, by its attribute ``type``."""
    classes: Mapping[str, str]
    """The attribute ``type`` of the devices in each DeviceClass that is installed with the driver."""


DRIVERS = (
    Driver(
        "gpu.nvidia.com",
        {"gpu": Kind.WHOLE, "vfio": Kind.WHOLE, "mig": Kind.MIG},
        {"gpu.nvidia.com": "gpu", "vfio.gpu.nvidia.com": "vfio", "mig.nvidia.com": "mig"},
    ),
    Driver("hami-core-gpu.project-hami.io", {"hami-gpu": Kind.SHARE}, {"hami-core-gpu.project-hami.io": "hami-gpu"}),
    Driver(
        "manager.nvidia.com",
        {"gpu": Kind.WHOLE, "vfio": Kind.WHOLE, "mig": Kind.MIG, "vgpu": Kind.SHARE},
        {"gpu-manager": "gpu", "vfio-manager": "vfio", "mig-manager": "mig", "vgpu-manager": "vgpu"},
    ),
)

_BY_NAME = {driver.name: driver for driver in DRIVERS}
_BY_CLASS = {name: driver for driver in DRIVERS for name in driver.classes}

NO_GPU_DRIVERS = frozenset({"compute-domain.nvidia.com"})
"""Drivers whose devices are not GPUs. The devices of this driver are channels between nodes."""

UnitWorth = Callable[[str], Charge | None]
"""Returns the value of one device of a DeviceClass by ``gpu_units``; None if ``gpu_units`` does not have the class."""


class DeviceKind(msgspec.Struct, frozen=True, gc=False):
    """The driver and type of a DeviceClass's devices, and how they are charged."""

    driver: str | None
    """The driver of the devices; None if it is unknown."""
    kind: Kind
    type: str = ""
    worth: Charge = Charge()
    """The value of one device of kind UNIT."""
    profile: str = ""
    """The MIG profile that the class requires; empty if the class requires no profile."""

    @property
    def is_gpu(self) -> bool:
        """True if the devices are charged."""
        return self.kind is not Kind.UNIT or self.worth != Charge()


def find_kind(name: str, devices: Devices, worth_of: UnitWorth) -> DeviceKind | None:
    """Return how the devices of DeviceClass ``name`` are charged; None if no value is configured for the class."""
    facts = devices.classes.get(name)
    own = _BY_CLASS.get(name)
    # The selectors of a DeviceClass determine the driver of its devices. If the class does not exist yet, the driver is
    # known only for the class names of the built-in drivers.
    driver = (facts and facts.driver) or (own and own.name) or None
    if driver in NO_GPU_DRIVERS:
        return DeviceKind(driver, Kind.UNIT)
    if driver in _BY_NAME:
        known = _BY_NAME[driver]
        device_type = (facts.type if facts else known.classes.get(name)) or ""
        worth = worth_of(name) if name not in known.classes else None
        if worth is not None:
            return DeviceKind(driver, Kind.UNIT, device_type, worth)
        # A device of an unknown type is charged as a whole card, because no device is more than one card.
        return DeviceKind(
            driver, known.kinds.get(device_type, Kind.WHOLE), device_type, profile=(facts and facts.profile) or ""
        )
    worth = worth_of(name)
    return None if worth is None else DeviceKind(driver, Kind.UNIT, worth=worth)
