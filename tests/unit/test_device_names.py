"""Tests that a device is found by its name in a claim's status. The device may be in any ResourceSlice of its pool."""

from examples.claims import A100, M40, NVIDIA, device, slice_of
from tests.tables import cases
from vcuda.claims.devices import Devices, read_slice
from vcuda.claims.objects import AllocatedDevice, ResourceSlice

OLD, NEW = (slice_of(NVIDIA, "gpu-1", device(product), generation=each) for each, product in ((1, M40), (2, A100)))
FIRST, SECOND = (slice_of(NVIDIA, "gpu-1", device(A100, name=name)) for name in ("gpu-0", "gpu-1"))


@cases(
    "slices, name, product",
    a_pool_of_one_slice=([FIRST], "gpu-0", A100),
    a_pool_of_several_slices=([FIRST, SECOND], "gpu-1", A100),
    the_newest_generation=([NEW, OLD], "gpu-0", A100),
    the_newest_generation_listed_last=([OLD, NEW], "gpu-0", A100),
    no_such_device_in_the_slice=([FIRST], "gpu-7", None),
    no_such_device_in_several_slices=([FIRST, SECOND], "gpu-7", None),
    no_such_pool=([], "gpu-0", None),
)
def test_a_device_is_found_in_the_slices_of_its_pool(
    slices: list[ResourceSlice], name: str, product: str | None
) -> None:
    found = Devices.of(map(read_slice, slices), {}).find(AllocatedDevice("", NVIDIA, "gpu-1", name))
    assert (found[0].product, found[1]) == (product, "gpu-1") if found else product is None
