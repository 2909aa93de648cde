"""Views of the objects of resource.k8s.io/v1, with the fields that are read: claims, templates, classes and slices.

As in ``vcuda.k8s_types``, they are decoded from raw bytes, and never written back.
"""

from collections.abc import Iterator, Mapping

from vcuda.k8s_types import K8sObject, K8sStruct, Quantity

GROUP = "resource.k8s.io"
API_VERSION = f"{GROUP}/v1"
"""The version that is read. Kubernetes has it from 1.34 on, and converts what is written in another."""

API_PATH = f"/apis/{API_VERSION}"

CLAIM, TEMPLATE = "ResourceClaim", "ResourceClaimTemplate"

EXACT_COUNT = "ExactCount"


class CelSelector(K8sStruct, frozen=True, gc=False):
    """A condition on a device, in CEL."""

    expression: str = ""


class DeviceSelector(K8sStruct, frozen=True, gc=False):
    """A condition on a device; all of a request's must hold, and all of its class' too."""

    cel: CelSelector | None = None


class CapacityRequirements(K8sStruct, frozen=True, gc=False):
    """How much of a device's capacities a request takes, by name; on a device that is not shared it only filters."""

    requests: Mapping[str, Quantity] | None = None


class DeviceEntry(K8sStruct, frozen=True, gc=False):
    """What is asked for by ``exactly``, or by one entry of ``firstAvailable``."""

    name: str = ""
    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] | None = None
    allocation_mode: str = ""
    count: int | None = None
    admin_access: bool | None = None
    capacity: CapacityRequirements | None = None

    @property
    def expressions(self) -> tuple[str, ...]:
        """The CEL expressions of its selectors."""
        return tuple(each.cel.expression for each in self.selectors or () if each.cel)


class DeviceRequest(K8sStruct, frozen=True, gc=False):
    """One request of a claim: exactly this, or the first of these that there is."""

    name: str = ""
    exactly: DeviceEntry | None = None
    first_available: tuple[DeviceEntry, ...] | None = None

    def entries(self) -> Iterator[tuple[int | None, DeviceEntry]]:
        """Yield each entry with its position in ``firstAvailable``, None for ``exactly``."""
        if self.exactly is not None:
            yield None, self.exactly
        yield from enumerate(self.first_available or ())


class OpaqueParameters(K8sStruct, frozen=True, gc=False):
    """Parameters for one driver, which alone knows what they mean."""

    driver: str = ""


class DeviceConfig(K8sStruct, frozen=True, gc=False):
    """How a driver is to set devices up: those of these requests, or of all."""

    requests: tuple[str, ...] | None = None
    opaque: OpaqueParameters | None = None


class DeviceClaim(K8sStruct, frozen=True, gc=False):
    """What a claim asks for. Its constraints only narrow that."""

    requests: tuple[DeviceRequest, ...] | None = None
    config: tuple[DeviceConfig, ...] | None = None


class ClaimSpec(K8sStruct, frozen=True, gc=False):
    """The spec of a claim, which cannot be changed once it is stored."""

    devices: DeviceClaim = DeviceClaim()


class AllocatedDevice(K8sStruct, frozen=True, gc=False):
    """A device that was allocated for one request; driver, pool and device are its name."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""


class AllocatedDevices(K8sStruct, frozen=True, gc=False):
    """The devices that were allocated for a claim."""

    results: tuple[AllocatedDevice, ...] | None = None


class ClaimAllocation(K8sStruct, frozen=True, gc=False):
    """What the scheduler has allocated for a claim."""

    devices: AllocatedDevices = AllocatedDevices()


class Consumer(K8sStruct, frozen=True, gc=False):
    """Who uses a claim: a pod, as a rule."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(K8sStruct, frozen=True, gc=False):
    """What has become of a claim; tenants cannot write it."""

    allocation: ClaimAllocation | None = None
    reserved_for: tuple[Consumer, ...] | None = None


class ResourceClaim(K8sObject, frozen=True, gc=False):
    """A claim."""

    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus | None = None

    @property
    def allocated(self) -> tuple[AllocatedDevice, ...]:
        """The devices that are allocated for it."""
        allocation = self.status.allocation if self.status else None
        return (allocation.devices.results or ()) if allocation else ()


class ClaimTemplateSpec(K8sObject, frozen=True, gc=False):
    """The claim that is made for each pod that names the template, with these labels and annotations."""

    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(K8sObject, frozen=True, gc=False):
    """A template of claims."""

    spec: ClaimTemplateSpec = ClaimTemplateSpec()


class DeviceClassSpec(K8sStruct, frozen=True, gc=False):
    """Which devices are of a class, and by which extended resource a pod may ask for them."""

    selectors: tuple[DeviceSelector, ...] | None = None
    extended_resource_name: str | None = None


class DeviceClass(K8sObject, frozen=True, gc=False):
    """A class of devices; only the cluster's administrator can make one."""

    spec: DeviceClassSpec = DeviceClassSpec()


class ValidRange(K8sStruct, frozen=True, gc=False):
    """Requests below ``min`` are raised to it, those above it rounded up by ``step``; above ``max`` none is met."""

    min: Quantity | None = None
    max: Quantity | None = None
    step: Quantity | None = None


class RequestPolicy(K8sStruct, frozen=True, gc=False):
    """What of a capacity a request takes: ``default`` where it names none, else rounded up to what is valid."""

    default: Quantity | None = None
    valid_values: tuple[Quantity, ...] | None = None
    valid_range: ValidRange | None = None


class DeviceCapacity(K8sStruct, frozen=True, gc=False):
    """How much of something a device has. Without a policy a request that names none takes all of it."""

    value: Quantity = 0
    request_policy: RequestPolicy | None = None


class DeviceAttribute(K8sStruct, frozen=True, gc=False):
    """A property of a device; those that are no text are not read."""

    string: str | None = None


class Device(K8sStruct, frozen=True, gc=False):
    """A device of a slice. Names without a domain are of the driver's own."""

    name: str = ""
    attributes: Mapping[str, DeviceAttribute] | None = None
    capacity: Mapping[str, DeviceCapacity] | None = None
    allow_multiple_allocations: bool | None = None


class ResourcePool(K8sStruct, frozen=True, gc=False):
    """The pool that a slice is a part of; of its generations only the newest counts."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class ResourceSliceSpec(K8sStruct, frozen=True, gc=False):
    """Devices that one driver offers; ``node_name`` is empty where they are not of one node."""

    driver: str = ""
    pool: ResourcePool = ResourcePool()
    node_name: str | None = None
    devices: tuple[Device, ...] | None = None


class ResourceSlice(K8sObject, frozen=True, gc=False):
    """A part of a pool of devices, as a driver publishes it."""

    spec: ResourceSliceSpec = ResourceSliceSpec()
