"""The known DRA drivers: the types of their devices, how each type is charged, and the DeviceClasses.

Sources: kubernetes-sigs/dra-driver-nvidia-gpu and Project-HAMi/k8s-dra-driver (``deployments/helm``, ``pkg`` for the
slices), coldzerofear/vgpu-manager (``deploy`` and ``pkg/kubeletplugin``).
"""

import enum
from collections.abc import Callable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.quota.model import Charge
from vcuda.requests.resources import WHOLE_CARD

CORES, MEMORY = "cores", "memory"
"""The capacities by which a claim requests a share of a card: cores in hundredths of a card, and memory in bytes."""


class Kind(enum.Enum):
    """How a device is charged: as a card, by its MIG profile, by the requested share, or by a fixed value."""

    WHOLE = enum.auto()
    """A whole card, or a part of the card if the driver lets several claims share the card."""
    MIG = enum.auto()
    SHARE = enum.auto()
    UNIT = enum.auto()
    """The charge is the value that key ``gpu_units`` of the quota ConfigMap has for the DeviceClass."""


class Driver(msgspec.Struct, frozen=True):
    """A DRA driver."""

    name: str
    kinds: Mapping[str, Kind]
    """By the value of a device's attribute ``type``: how the device is charged."""
    classes: Mapping[str, str]
    """By the name of a DeviceClass that is installed with the driver: the attribute ``type`` of its devices."""


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
"""DRA drivers whose devices are not GPUs. A device of compute-domain.nvidia.com is a channel between nodes."""

UnitValue = Callable[[str], Charge | None]
"""A function that returns the charge of one device of the named DeviceClass; None if no charge is configured."""


class DeviceKind(msgspec.Struct, frozen=True, gc=False):
    """The driver and the type of the devices of a DeviceClass, and how such a device is charged."""

    driver: str | None
    """The DRA driver of the devices; None if the driver is unknown."""
    kind: Kind
    type: str = ""
    value: Charge = Charge()
    """The charge of one device in key ``gpu_units`` of the quota ConfigMap, if ``kind`` is UNIT. If ``kind`` is WHOLE:
    the charge of a card that any number of claims may share."""
    profile: str = ""
    """The MIG profile that the DeviceClass requires; empty if it requires no profile."""

    @property
    def is_gpu(self) -> bool:
        """True if devices of the class are charged; False if they are no GPUs, by ``gpu_units`` or by their driver."""
        return self.kind is not Kind.UNIT or self.value != Charge()


def find_kind(name: str, devices: Devices, value_of: UnitValue) -> DeviceKind | None:
    """Return how devices of a DeviceClass are charged; None if neither `gpu_units` nor the driver says so."""
    facts = devices.classes.get(name)
    own = _BY_CLASS.get(name)
    # The selectors of a DeviceClass show the driver of its devices. If the class does not exist yet, only the names of
    # the built-in classes show the driver.
    driver = (facts and facts.driver) or (own and own.name) or None
    if driver in NO_GPU_DRIVERS:
        return DeviceKind(driver, Kind.UNIT)
    if driver in _BY_NAME:
        known = _BY_NAME[driver]
        device_type = (facts.type if facts else known.classes.get(name)) or ""
        value = value_of(name)
        if value is not None and name not in known.classes:
            return DeviceKind(driver, Kind.UNIT, device_type, value)
        # A device of an unknown type is charged as a whole card, because no device is more than one card.
        kind = known.kinds.get(device_type, Kind.WHOLE)
        return DeviceKind(driver, kind, device_type, value or WHOLE_CARD, profile=(facts and facts.profile) or "")
    value = value_of(name)
    return None if value is None else DeviceKind(driver, Kind.UNIT, value=value)
