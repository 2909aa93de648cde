"""Tests of the search for pods that got a card of another model than they are charged, by the vendors' annotations."""

from collections.abc import Mapping
from typing import Any

from controller.violations.violation_watcher import event_of
from controller.violations.violations import find_violations
from tests.builders import LABELS, MODEL, held_to, stored_pod, view
from tests.tables import cases
from vcuda.allocations.stored_pods import read_stored
from vcuda.placement.nodes import Nodes
from vcuda.placement.registers import Card
from vcuda.quota.model import Limit, Mode, NamespaceQuota

CARDS = (Card("GPU-a10", "NVIDIA A10"), Card("GPU-a100", "NVIDIA A100"))
BIG = (Card("GPU-b", "NVIDIA A100"),)
NODES = Nodes.of(
    {"mixed": {MODEL: "A10"}, "big": {MODEL: "A100"}},
    LABELS,
    {"mixed": {"hami": CARDS, "vgpu-manager": CARDS}, "big": {"hami": BIG, "vgpu-manager": BIG}},
)
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1000, "nvidia.com/gpucores": 10}
VGPU = {"nvidia.com/vgpu-number": 1}
HAMI, VGPU_MANAGER = "hami.io/vgpu-devices-allocated", "nvidia.com/real-allocated"
QUOTA = NamespaceQuota({"A10": Limit(800)}, mode=Mode.ENFORCE)
GIVEN = "the pod or claim is charged to A10, but was given card GPU-a100 of node mixed, a NVIDIA A100, of model A100"


@cases(
    "limits, annotations, fields, told",
    its_own=(SHARE, {HAMI: "GPU-a10,NVIDIA,1000,10:;"}, {}, []),
    anothers=(SHARE, {HAMI: "GPU-a100,NVIDIA,1000,10:;"}, {}, [GIVEN]),
    one_of_two=(SHARE, {HAMI: ";GPU-a10,NVIDIA,1000,10:GPU-a100,NVIDIA,1000,10:;"}, {}, [GIVEN]),
    a_slice=(SHARE, {HAMI: "GPU-a100[0-1],NVIDIA,1000,10:;"}, {}, [GIVEN]),
    of_vgpu_manager=(VGPU, {VGPU_MANAGER: "c0[0_GPU-a100_20_1000];c1[]"}, {}, [GIVEN]),
    its_own_of_vgpu_manager=(VGPU, {VGPU_MANAGER: "c0[0_GPU-a10_20_1000];c1[]"}, {}, []),
    not_given_yet=(SHARE, {"hami.io/vgpu-devices-to-allocate": "GPU-a100,NVIDIA,1000,10:;"}, {}, []),
    a_card_that_nobody_knows=(SHARE, {HAMI: "GPU-c,NVIDIA,1000,10:;"}, {}, []),
    not_what_is_written=(SHARE, {HAMI: "[{]:::"}, {}, []),
    not_bound=(SHARE, {HAMI: "GPU-a100,NVIDIA,1000,10:;"}, {"nodeName": ""}, []),
    on_another_node=(SHARE, {HAMI: "GPU-a100,NVIDIA,1000,10:;"}, {"nodeName": "big"}, []),
)
def test_a_pod_on_another_models_card_is_reported_and_neither_evicted_nor_charged_differently(
    limits: Mapping[str, int], annotations: Mapping[str, str], fields: Mapping[str, str], told: list[str]
) -> None:
    placed: dict[str, Any] = {"affinity": held_to("A10"), "nodeName": "mixed", **fields}
    pod = read_stored(view(stored_pod(limits, annotations=annotations, **placed)), LABELS)
    assert pod
    found = find_violations("team-a", QUOTA, [pod], NODES)
    assert [each.message for each in found] == told
    for each in found:
        assert (each.kind.value, each.evictable) == ("other-model", False)
        assert event_of(each).reason == "OtherModelAllocated"
    unlisted = NamespaceQuota({"T4": Limit(1)})
    assert [each.kind.value for each in find_violations("team-a", unlisted, [pod], NODES)] == ["not-allowed"]
