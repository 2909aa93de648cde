"""The fields that are read of objects of resource.k8s.io/v1: claims, templates, classes and slices.

As in ``vcuda.k8s_types``, objects are decoded from raw bytes, and are never written back.
"""

from collections.abc import Iterator, Mapping

from vcuda.k8s_types import K8sObject, K8sStruct, Quantity

EXACT_COUNT = "ExactCount"


class CelSelector(K8sStruct, frozen=True, gc=False):
    """A condition on a device, in CEL."""

    expression: str = ""


class DeviceSelector(K8sStruct, frozen=True, gc=False):
    """A condition on a device. A device must match all selectors of the request and of its class."""

    cel: CelSelector | None = None


class CapacityRequirements(K8sStruct, frozen=True, gc=False):
    """The requested amounts of capacities, by name. If the device is not shared, they only filter devices."""

    requests: Mapping[str, Quantity] | None = None


class DeviceEntry(K8sStruct, frozen=True, gc=False):
    """The value of ``exactly``, or one entry of ``firstAvailable``."""

    name: str = ""
    device_class_name: str = ""
    selectors: tuple[DeviceSelector, ...] | None = None
    allocation_mode: str = ""
    count: int | None = None
    admin_access: bool | None = None
    capacity: CapacityRequirements | None = None

    @property
    def expressions(self) -> tuple[str, ...]:
        return tuple(each.cel.expression for each in self.selectors or () if each.cel)


class DeviceRequest(K8sStruct, frozen=True, gc=False):
    """One request of a claim: one entry, or the first of several entries that is available."""

    name: str = ""
    exactly: DeviceEntry | None = None
    first_available: tuple[DeviceEntry, ...] | None = None

    def entries(self) -> Iterator[tuple[int | None, DeviceEntry]]:
        """Yield each entry after its position in ``firstAvailable``. The position is None for ``exactly``."""
        if self.exactly is not None:
            yield None, self.exactly
        yield from enumerate(self.first_available or ())


class OpaqueParameters(K8sStruct, frozen=True, gc=False):
    """Parameters for one driver. Their meaning depends on the driver."""

    driver: str = ""


class DeviceConfig(K8sStruct, frozen=True, gc=False):
    """Parameters for the devices of some requests, or of all requests if ``requests`` is empty."""

    requests: tuple[str, ...] | None = None
    opaque: OpaqueParameters | None = None


class DeviceClaim(K8sStruct, frozen=True, gc=False):
    """The requests of a claim. The constraints are not read, because they only narrow the devices."""

    requests: tuple[DeviceRequest, ...] | None = None
    config: tuple[DeviceConfig, ...] | None = None


class ClaimSpec(K8sStruct, frozen=True, gc=False):
    """The spec of a claim. It cannot change after the claim is stored."""

    devices: DeviceClaim = DeviceClaim()


class AllocatedDevice(K8sStruct, frozen=True, gc=False):
    """A device that was allocated for one request. Driver, pool and device together are its name."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""


class AllocatedDevices(K8sStruct, frozen=True, gc=False):
    """The devices that were allocated for a claim."""

    results: tuple[AllocatedDevice, ...] | None = None


class ClaimAllocation(K8sStruct, frozen=True, gc=False):
    """The allocation of a claim, which the scheduler writes."""

    devices: AllocatedDevices = AllocatedDevices()


class Consumer(K8sStruct, frozen=True, gc=False):
    """A user of a claim, usually a pod."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(K8sStruct, frozen=True, gc=False):
    """The status of a claim, which tenants cannot write."""

    allocation: ClaimAllocation | None = None
    reserved_for: tuple[Consumer, ...] | None = None


class ResourceClaim(K8sObject, frozen=True, gc=False):
    """A ResourceClaim."""

    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus | None = None

    @property
    def allocated(self) -> tuple[AllocatedDevice, ...]:
        allocation = self.status.allocation if self.status else None
        return (allocation.devices.results or ()) if allocation else ()


class ClaimTemplateSpec(K8sObject, frozen=True, gc=False):
    """The claim that is created for each pod that names the template, with these labels and annotations."""

    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(K8sObject, frozen=True, gc=False):
    """A template of claims."""

    spec: ClaimTemplateSpec = ClaimTemplateSpec()


class DeviceClassSpec(K8sStruct, frozen=True, gc=False):
    """The selectors of a class, and the extended resource by which a pod may request its devices."""

    selectors: tuple[DeviceSelector, ...] | None = None
    extended_resource_name: str | None = None


class DeviceClass(K8sObject, frozen=True, gc=False):
    """A class of devices, which only the cluster's administrator can create."""

    spec: DeviceClassSpec = DeviceClassSpec()


class ValidRange(K8sStruct, frozen=True, gc=False):
    """The valid amounts of a request: raised to ``min``, rounded up by ``step``, and not above ``max``."""

    min: Quantity | None = None
    max: Quantity | None = None
    step: Quantity | None = None


class RequestPolicy(K8sStruct, frozen=True, gc=False):
    """The rules that round a request up to a valid amount. A request without an amount gets ``default``."""

    default: Quantity | None = None
    valid_values: tuple[Quantity, ...] | None = None
    valid_range: ValidRange | None = None


class DeviceCapacity(K8sStruct, frozen=True, gc=False):
    """One capacity of a device. Without a policy, a request that states no amount takes the whole capacity."""

    value: Quantity = 0
    request_policy: RequestPolicy | None = None


class DeviceAttribute(K8sStruct, frozen=True, gc=False):
    """A property of a device. Only texts are read."""

    string: str | None = None


class Device(K8sStruct, frozen=True, gc=False):
    """A device of a slice. A name without a domain is in the driver's domain."""

    name: str = ""
    attributes: Mapping[str, DeviceAttribute] | None = None
    capacity: Mapping[str, DeviceCapacity] | None = None
    allow_multiple_allocations: bool | None = None


class ResourcePool(K8sStruct, frozen=True, gc=False):
    """The pool of a slice. Only the newest generation of a pool counts."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class ResourceSliceSpec(K8sStruct, frozen=True, gc=False):
    """Devices of one driver. ``node_name`` is empty if the devices are not on one node."""

    driver: str = ""
    pool: ResourcePool = ResourcePool()
    node_name: str | None = None
    devices: tuple[Device, ...] | None = None


class ResourceSlice(K8sObject, frozen=True, gc=False):
    """A part of a pool of devices, as a driver publishes it."""

    spec: ResourceSliceSpec = ResourceSliceSpec()
