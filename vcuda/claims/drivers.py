"""The DRA drivers whose devices are known here, one row each: what its kinds of devices are worth, and its classes.

Sources: kubernetes-sigs/dra-driver-nvidia-gpu and Project-HAMi/k8s-dra-driver (``deployments/helm``, ``pkg`` where the
slices are made), coldzerofear/vgpu-manager (``deploy`` and ``pkg/kubeletplugin``).
"""

import enum
from collections.abc import Callable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.quota.model import Charge

CORES, MEMORY = "cores", "memory"
"""The capacities that a share is asked for by: hundredths of a card, and bytes."""


class Kind(enum.Enum):
    """What one device of a class is to a quota."""

    WHOLE = enum.auto()
    MIG = enum.auto()
    SHARE = enum.auto()
    UNIT = enum.auto()
    """What the operator's own row says."""


class Driver(msgspec.Struct, frozen=True):
    """A driver's name, what its devices are by their attribute ``type``, and the type of each class of its own."""

    name: str
    kinds: Mapping[str, Kind]
    classes: Mapping[str, str]


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
"""Drivers whose devices are no GPUs: NVIDIA's channels between nodes."""

UnitWorth = Callable[[str], Charge | None]
"""What one device of a class is worth by the table of units; None where the class is not in it."""


class DeviceKind(msgspec.Struct, frozen=True, gc=False):
    """The devices of a class: whose they are (None: not known), how they are counted, and their type, or empty.

    ``worth`` is of kind UNIT alone. ``profile`` is the MIG profile that the class itself demands, or empty.
    """

    driver: str | None
    kind: Kind
    type: str = ""
    worth: Charge = Charge()
    profile: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are worth anything."""
        return self.kind is not Kind.UNIT or self.worth != Charge()


def find_kind(name: str, devices: Devices, worth_of: UnitWorth) -> DeviceKind | None:
    """Return what the devices of a class are; None where nobody has said what they are worth."""
    facts = devices.classes.get(name)
    own = _BY_CLASS.get(name)
    # What the class itself says counts more than its name; before it is there, its name has to do.
    driver = (facts and facts.driver) or (own and own.name) or None
    if driver in NO_GPU_DRIVERS:
        return DeviceKind(driver, Kind.UNIT)
    if driver in _BY_NAME:
        known = _BY_NAME[driver]
        said = (facts.type if facts else known.classes.get(name)) or ""
        worth = worth_of(name) if name not in known.classes else None
        if worth is not None:
            return DeviceKind(driver, Kind.UNIT, said, worth)
        # Of a kind that is not known, or not said, a device is at most a whole card.
        return DeviceKind(driver, known.kinds.get(said, Kind.WHOLE), said, profile=(facts and facts.profile) or "")
    worth = worth_of(name)
    return None if worth is None else DeviceKind(driver, Kind.UNIT, worth=worth)
