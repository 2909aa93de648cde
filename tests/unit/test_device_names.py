"""Tests that a device is found by its name in a claim's status. The device may be in any ResourceSlice of its pool."""

import pytest

from examples.claims import A100, M40, NVIDIA, device, slice_of
from vcuda.claims.devices import Devices, read_slice
from vcuda.claims.objects import AllocatedDevice, ResourceSlice

OLD, NEW = (slice_of(NVIDIA, "gpu-1", device(product), generation=each) for each, product in ((1, M40), (2, A100)))
FIRST, SECOND = (slice_of(NVIDIA, "gpu-1", device(A100, name=name)) for name in ("gpu-0", "gpu-1"))


@pytest.mark.parametrize(
    ("slices", "name", "product"),
    [
        pytest.param([FIRST], "gpu-0", A100, id="a pool of one slice"),
        pytest.param([FIRST, SECOND], "gpu-1", A100, id="a pool of several slices"),
        pytest.param([NEW, OLD], "gpu-0", A100, id="the newest generation"),
        pytest.param([OLD, NEW], "gpu-0", A100, id="the newest generation, listed last"),
        pytest.param([FIRST], "gpu-7", None, id="no such device in the slice"),
        pytest.param([FIRST, SECOND], "gpu-7", None, id="no such device in several slices"),
        pytest.param([], "gpu-0", None, id="no such pool"),
    ],
)
def test_a_device_is_found_in_the_slices_of_its_pool(
    slices: list[ResourceSlice], name: str, product: str | None
) -> None:
    found = Devices.of(map(read_slice, slices), {}).find(AllocatedDevice("", NVIDIA, "gpu-1", name))
    assert (found[0].product, found[1]) == (product, "gpu-1") if found else product is None
