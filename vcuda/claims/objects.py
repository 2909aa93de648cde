"""Types for the objects of resource.k8s.io/v1 (claims, templates, classes, slices) with only the fields that are read.

As in ``vcuda.k8s_types``, objects are decoded from raw bytes, and are never written back.
"""

from collections.abc import Iterator, Mapping

from vcuda.k8s_types import K8sObject, K8sStruct, Quantity

EXACT_COUNT = "ExactCount"


class CelSelector(K8sStruct, frozen=True, gc=False):
    """A condition on devices in a claim or DeviceClass, as a CEL expression."""

    expression: str = ""


class DeviceSelector(K8sStruct, frozen=True, gc=False):
    """A condition on devices. A device must match all selectors of a request and of the request's DeviceClass."""

    cel: CelSelector | None = None


class CapacityRequirements(K8sStruct, frozen=True, gc=False):
    """The requested amounts of capacities, by name. For unshared devices, the amounts are only a filter."""

    requests: Mapping[str, Quantity] | None = None


class DeviceEntry(K8sStruct, frozen=True, gc=False):
    """One entry of a device request in a claim: ``exactly``, or one of the alternatives in ``firstAvailable``."""

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
    """One device request of a claim. It has one entry, or alternatives of which the first available one is used."""

    name: str = ""
    exactly: DeviceEntry | None = None
    first_available: tuple[DeviceEntry, ...] | None = None

    def entries(self) -> Iterator[tuple[int | None, DeviceEntry]]:
        """Yield the entries of the request, each with its position in ``firstAvailable`` (None for ``exactly``)."""
        if self.exactly is not None:
            yield None, self.exactly
        yield from enumerate(self.first_available or ())


class OpaqueParameters(K8sStruct, frozen=True, gc=False):
    """Parameters for one DRA driver. Only the driver knows their meaning."""

    driver: str = ""


class DeviceConfig(K8sStruct, frozen=True, gc=False):
    """Parameters for the devices of the named requests of a claim; if ``requests`` is empty, for all its devices."""

    requests: tuple[str, ...] | None = None
    opaque: OpaqueParameters | None = None


class DeviceClaim(K8sStruct, frozen=True, gc=False):
    """The device requests of a claim. Constraints are not read, because they only narrow the devices."""

    requests: tuple[DeviceRequest, ...] | None = None
    config: tuple[DeviceConfig, ...] | None = None


class ClaimSpec(K8sStruct, frozen=True, gc=False):
    """The spec of a claim. It cannot change after the claim is stored."""

    devices: DeviceClaim = DeviceClaim()


class AllocatedDevice(K8sStruct, frozen=True, gc=False):
    """A device that the scheduler has allocated for one request. Its driver, pool and name identify the device."""

    request: str = ""
    driver: str = ""
    pool: str = ""
    device: str = ""


class AllocatedDevices(K8sStruct, frozen=True, gc=False):
    """The devices that the scheduler has allocated for a claim."""

    results: tuple[AllocatedDevice, ...] | None = None


class ClaimAllocation(K8sStruct, frozen=True, gc=False):
    """The allocation of devices to a claim, which the scheduler writes."""

    devices: AllocatedDevices = AllocatedDevices()


class Consumer(K8sStruct, frozen=True, gc=False):
    """An object that may use a claim's devices, usually a pod."""

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
    """The labels, annotations and spec of the claims that are created from a template."""

    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(K8sObject, frozen=True, gc=False):
    """A template of claims."""

    spec: ClaimTemplateSpec = ClaimTemplateSpec()


class DeviceClassSpec(K8sStruct, frozen=True, gc=False):
    """The spec of a DeviceClass: its selectors, and the extended resource by which pods can request its devices."""

    selectors: tuple[DeviceSelector, ...] | None = None
    extended_resource_name: str | None = None


class DeviceClass(K8sObject, frozen=True, gc=False):
    """A DeviceClass, which only cluster administrators can create."""

    spec: DeviceClassSpec = DeviceClassSpec()


class ValidRange(K8sStruct, frozen=True, gc=False):
    """The rule for requested amounts: at least ``min``, and rounded up to ``min`` plus a multiple of ``step``."""

    min: Quantity | None = None
    step: Quantity | None = None


class RequestPolicy(K8sStruct, frozen=True, gc=False):
    """The rules that round a requested amount up to a valid amount. A request without an amount gets ``default``."""

    default: Quantity | None = None
    valid_values: tuple[Quantity, ...] | None = None
    valid_range: ValidRange | None = None


class DeviceCapacity(K8sStruct, frozen=True, gc=False):
    """One capacity of a device. Without a policy, a request that states no amount gets the whole capacity."""

    value: Quantity = 0
    request_policy: RequestPolicy | None = None


class DeviceAttribute(K8sStruct, frozen=True, gc=False):
    """An attribute of a device. Only string values are decoded."""

    string: str | None = None


class Device(K8sStruct, frozen=True, gc=False):
    """A device in a ResourceSlice. Attributes and capacities without a domain belong to the domain of the driver."""

    name: str = ""
    attributes: Mapping[str, DeviceAttribute] | None = None
    capacity: Mapping[str, DeviceCapacity] | None = None
    allow_multiple_allocations: bool | None = None


class ResourcePool(K8sStruct, frozen=True, gc=False):
    """The pool to which a ResourceSlice belongs. Slices of older generations of the pool are ignored."""

    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class ResourceSliceSpec(K8sStruct, frozen=True, gc=False):
    """The devices of one driver in a ResourceSlice. ``node_name`` is empty if they do not belong to one node."""

    driver: str = ""
    pool: ResourcePool = ResourcePool()
    node_name: str | None = None
    devices: tuple[Device, ...] | None = None


class ResourceSlice(K8sObject, frozen=True, gc=False):
    """A ResourceSlice: a part of a pool of devices, which the driver of the devices publishes."""

    spec: ResourceSliceSpec = ResourceSliceSpec()
