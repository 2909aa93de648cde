"""The known DRA drivers. Each row has the kinds of a driver's devices, and the driver's DeviceClasses.

Sources: kubernetes-sigs/dra-driver-nvidia-gpu and Project-HAMi/k8s-dra-driver (``deployments/helm``, ``pkg`` for the
slices), coldzerofear/vgpu-manager (``deploy`` and ``pkg/kubeletplugin``).
"""

import enum
from collections.abc import Callable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.quota.model import Charge

CORES, MEMORY = "cores", "memory"
"""The capacities of a share. ``cores`` are hundredths of a card, ``memory`` is in bytes."""


class Kind(enum.Enum):
    """The ways to charge one device of a class."""

    WHOLE = enum.auto()
    MIG = enum.auto()
    SHARE = enum.auto()
    UNIT = enum.auto()
    """The charge is the value in the operator's row for the class."""


class Driver(msgspec.Struct, frozen=True):
    """A DRA driver."""

    name: str
    kinds: Mapping[str, Kind]
    """The kinds of the driver's devices, by the attribute ``type`` of the device."""
    classes: Mapping[str, str]
    """The device types of the driver's own DeviceClasses, by the name of the class."""


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
"""The drivers whose devices are not GPUs. NVIDIA's driver has channels between nodes."""

UnitWorth = Callable[[str], Charge | None]
"""Returns the value of one device of a class in the table of units; None if the class is not in this table."""


class DeviceKind(msgspec.Struct, frozen=True, gc=False):
    """The devices of a DeviceClass, and the way to charge them."""

    driver: str | None
    """The driver of the devices; None if it is unknown."""
    kind: Kind
    type: str = ""
    worth: Charge = Charge()
    """The value of one device of kind UNIT."""
    profile: str = ""
    """The MIG profile that the class demands; empty if it demands none."""

    @property
    def is_gpu(self) -> bool:
        """True if the devices have a value, so that they are charged."""
        return self.kind is not Kind.UNIT or self.worth != Charge()


def find_kind(name: str, devices: Devices, worth_of: UnitWorth) -> DeviceKind | None:
    """Return the kind of the devices of a class; None if no value is configured for them."""
    facts = devices.classes.get(name)
    own = _BY_CLASS.get(name)
    # The selectors of the class take precedence over its name. The name is used if the class does not exist yet.
    driver = (facts and facts.driver) or (own and own.name) or None
    if driver in NO_GPU_DRIVERS:
        return DeviceKind(driver, Kind.UNIT)
    if driver in _BY_NAME:
        known = _BY_NAME[driver]
        said = (facts.type if facts else known.classes.get(name)) or ""
        worth = worth_of(name) if name not in known.classes else None
        if worth is not None:
            return DeviceKind(driver, Kind.UNIT, said, worth)
        # A device of an unknown type is at most a whole card.
        return DeviceKind(driver, known.kinds.get(said, Kind.WHOLE), said, profile=(facts and facts.profile) or "")
    worth = worth_of(name)
    return None if worth is None else DeviceKind(driver, Kind.UNIT, worth=worth)
