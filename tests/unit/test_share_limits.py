"""Tests that a pod cannot replace the files and variables that limit its share of a card."""

from collections.abc import Mapping
from typing import Any

import pytest

from examples.allocations import card_of, share_of
from examples.claims import claim_policy
from tests.both_calls import validated_on_m40
from tests.builders import Manifest, container, pod
from tests.tables import cases
from vcuda.quota.allowances import Allowance
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme
from vcuda.requests.share_limits import HAMI_CORE, TMP, VCUDA_CONTROLLER, VGPU_MANAGER_LIBRARY, ShareLimits

SET: dict[str, tuple[str, ...]] = {
    "gpu-manager": ("LD_LIBRARY_PATH",),
    "nvidia-vcuda": ("LD_LIBRARY_PATH",),
    "hami": (
        "CUDA_DISABLE_CONTROL",
        "CUDA_DEVICE_MEMORY_LIMIT",
        "CUDA_DEVICE_MEMORY_LIMIT_0",
        "CUDA_DEVICE_MEMORY_LIMIT_15",
        "CUDA_DEVICE_SM_LIMIT",
        "CUDA_DEVICE_SM_LIMIT_3",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE",
        "CUDA_OVERSUBSCRIBE",
        "CUDA_TASK_PRIORITY",
        "GPU_CORE_UTILIZATION_POLICY",
        "ACTIVE_OOM_KILLER",
    ),
    "vgpu-manager": (
        "DISABLE_VGPU_CONTROL",
        "CUDA_MEM_LIMIT",
        "CUDA_MEM_LIMIT_0",
        "CUDA_CORE_LIMIT",
        "CUDA_CORE_LIMIT_2",
        "CUDA_CORE_SOFT_LIMIT",
        "CUDA_CORE_SOFT_LIMIT_0",
        "CUDA_MEM_OVERSOLD",
        "CUDA_MEM_OVERSOLD_0",
        "CUDA_MEM_RATIO",
        "MANAGER_VISIBLE_DEVICE",
        "MANAGER_VISIBLE_DEVICE_0",
        "MANAGER_VISIBLE_DEVICES",
        "GPU_DEVICES_UUID",
        "VGPU_POD_NAME",
    ),
}
"""For each scheme (a vendor's resource names), the variables that its device plugin sets or its library reads."""

CLAIM = {"name": "gpu", "resourceClaimName": "train"}
EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


VARIABLES = pytest.mark.parametrize(
    ("scheme", "name"),
    [pytest.param(each, name, id=f"{each.name} {name}") for each in SCHEMES for name in SET[each.name]],
)


def faults_of(manifest: Manifest, *allow: Allowance, units: str = "") -> list[str]:
    """Return the field paths of the pod's faults. In this cluster, ResourceClaims are charged."""
    return [fault.path for fault in validated_on_m40(manifest, *allow, units=units, claims=claim_policy()).faults]


def with_variable(limits: Mapping[str, int], name: str, value: str = "99", **spec: Any) -> Manifest:
    return pod(container(limits, env=[{"name": name, "value": value}]), **spec)


def with_mount(limits: Mapping[str, int], path: str, **spec: Any) -> Manifest:
    return pod(container(limits, volumeMounts=[{"name": "own", "mountPath": path}]), **spec)


VARIABLE, MOUNT = "spec.containers[0].env[0]", "spec.containers[0].volumeMounts[0].mountPath"


@VARIABLES
def test_no_variable_replaces_a_limit_of_a_share_without_its_permission(scheme: Scheme, name: str) -> None:
    manifest = with_variable(share_of(scheme), name)
    limit = scheme.limits.find(name)
    assert limit is not None
    assert faults_of(manifest) == [VARIABLE]
    assert faults_of(manifest, *(set(Allowance) - {limit.allowance})) == [VARIABLE]
    assert faults_of(manifest, limit.allowance) == []


@VARIABLES
def test_a_value_from_another_object_is_rejected_because_it_is_unknown(scheme: Scheme, name: str) -> None:
    variable = {"name": name, "valueFrom": {"configMapKeyRef": {"name": "own", "key": "limit"}}}
    assert faults_of(pod(container(share_of(scheme), env=[variable]))) == [VARIABLE]


@VARIABLES
def test_on_a_whole_card_a_limit_may_be_set(scheme: Scheme, name: str) -> None:
    """The variables that switch off a vendor's control of shares are rejected even on a whole card."""
    limit = scheme.limits.find(name)
    switches = limit is not None and limit.allowance is Allowance.DISABLE_CONTROL
    assert faults_of(with_variable(card_of(scheme), name)) == [VARIABLE] * switches


@cases(
    "limits",
    memory_alone={"nvidia.com/gpu": 1, "nvidia.com/gpumem": 100},
    percentage_alone={"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50},
    two_halves={"nvidia.com/gpu": 2, "nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 50},
    cores_alone={"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50},
)
def test_a_part_of_a_cards_memory_is_a_share_as_well_as_a_part_of_its_cores(limits: Mapping[str, int]) -> None:
    assert faults_of(with_variable(limits, "CUDA_DEVICE_MEMORY_LIMIT")) == [VARIABLE]


@pytest.mark.parametrize(
    ("scheme", "name", "value"),
    [
        (HAMI, "GPU_CORE_UTILIZATION_POLICY", "default"),
        (HAMI, "GPU_CORE_UTILIZATION_POLICY", " Force"),
        (HAMI, "LIBCUDA_LOG_LEVEL", "4"),
        (HAMI, "CUDA_VISIBLE_DEVICES", "0"),
        (HAMI, "LD_PRELOAD", "/usr/lib/libjemalloc.so"),
        (HAMI, "LD_LIBRARY_PATH", "/opt/lib"),
        (HAMI, "CUDA_MEM_LIMIT", "1"),
        (VGPU_MANAGER, "LOGGER_LEVEL", "5"),
        (VGPU_MANAGER, "CUDA_DEVICE_MEMORY_LIMIT", "1"),
        (GPU_MANAGER, "LD_LIBRARY_PATH", "/usr/local/nvidia/lib64:/opt/lib"),
        (NVIDIA_VCUDA, "LD_LIBRARY_PATH", "/usr/local/nvidia/lib"),
        (GPU_MANAGER, "compat32", "false"),
    ],
)
def test_a_variable_that_lifts_no_limit_of_this_vendor_is_admitted(scheme: Scheme, name: str, value: str) -> None:
    assert faults_of(with_variable(share_of(scheme), name, value)) == []


@cases(
    "value, rejected",
    as_hamis_webhook_writes_it=("1", False),
    another_one=("0", True),
)
def test_the_priority_is_that_of_the_resource(value: str, *, rejected: bool) -> None:
    limits = {**share_of(HAMI), "nvidia.com/priority": 1}
    assert bool(faults_of(with_variable(limits, "CUDA_TASK_PRIORITY", value))) is rejected


def test_a_common_variable_is_rejected_only_in_the_container_that_has_the_share() -> None:
    path: Manifest = {"env": [{"name": "LD_LIBRARY_PATH", "value": "/opt/lib"}]}
    share = container(share_of(GPU_MANAGER))
    assert faults_of(pod(share, container(**path))) == []
    assert faults_of(pod(container(), container(share_of(GPU_MANAGER), **path))) == ["spec.containers[1].env[0]"]


def test_a_variable_of_a_vendor_is_rejected_in_every_container_of_the_pod() -> None:
    variable = {"name": "CUDA_OVERSUBSCRIBE", "value": "true"}
    assert faults_of(pod(container(share_of(HAMI)), init=[container(env=[variable])])) == [
        "spec.initContainers[0].env[0]"
    ]


@pytest.mark.parametrize(
    ("name", "rejected"),
    [
        ("CUDA_DISABLE_CONTROL", True),
        ("DISABLE_VGPU_CONTROL", True),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", True),
        ("CUDA_MEM_LIMIT_0", True),
        ("GPU_CORE_UTILIZATION_POLICY", True),
        ("LD_LIBRARY_PATH", False),
        ("LOGGER_LEVEL", False),
    ],
)
def test_a_pod_with_a_claim_or_a_unit_may_have_a_share_of_any_vendor_with_dra(name: str, *, rejected: bool) -> None:
    claiming = container(env=[{"name": name, "value": "99"}], resources={"claims": [{"name": "gpu"}]})
    assert faults_of(pod(claiming, resourceClaims=[CLAIM])) == [VARIABLE] * rejected
    units = "{volcano.sh/vgpu-number: {cards: 0.1}}"
    assert faults_of(with_variable({"volcano.sh/vgpu-number": 1}, name), units=units) == [VARIABLE] * rejected


# Tests of mounts


@EACH
def test_no_volume_is_mounted_over_the_library_of_a_share(scheme: Scheme) -> None:
    for path in scheme.limits.paths:
        for mounted in (path, f"{path}/x", path.rpartition("/")[0] or "/"):
            expected = [] if mounted == TMP else [MOUNT]
            assert faults_of(with_mount(share_of(scheme), mounted)) == expected, mounted
            assert faults_of(with_mount(share_of(scheme), mounted), Allowance.LIMIT_LIBRARY) == []
            assert faults_of(with_mount(card_of(scheme), mounted)) == []


@pytest.mark.parametrize(
    "path",
    [
        "/etc/ld.so.preload",
        "etc/ld.so.preload",
        "//etc//ld.so.preload/",
        "/etc/./ld.so.preload",
        "/data/../etc/ld.so.preload",
        "/../../etc/ld.so.preload",
        "/etc",
        "/etc/",
        "/etc/x/..",
        "/",
        "",
    ],
)
def test_the_preload_file_cannot_be_replaced_by_any_form_of_its_path(path: str) -> None:
    for scheme in (HAMI, VGPU_MANAGER):
        assert faults_of(with_mount(share_of(scheme), path)) == [MOUNT]


@pytest.mark.parametrize(
    "path",
    ["/etc/ld.so.preload.d", "/etc/ssl", "/usr/local/lib", "/data/etc/ld.so.preload", TMP, "/usr/local/vgpu2"],
)
def test_a_volume_next_to_the_library_is_admitted(path: str) -> None:
    for scheme in (HAMI, VGPU_MANAGER):
        assert faults_of(with_mount(share_of(scheme), path)) == []


def test_only_the_mounts_of_containers_with_a_gpu_are_judged() -> None:
    mounts: Manifest = {"volumeMounts": [{"name": "own", "mountPath": "/etc"}]}
    assert faults_of(pod(container(share_of(HAMI)), container(**mounts))) == []
    claiming = container(resources={"claims": [{"name": "gpu"}]}, **mounts)
    assert faults_of(pod(container(**mounts), claiming, resourceClaims=[CLAIM])) == [
        "spec.containers[1].volumeMounts[0].mountPath"
    ]


# Tests of the tables with the variables and libraries that limit a container's share of a card


@pytest.mark.parametrize("limits", [VCUDA_CONTROLLER, HAMI_CORE, VGPU_MANAGER_LIBRARY])
def test_every_pattern_is_found_by_its_own_name(limits: ShareLimits) -> None:
    for each in limits.variables:
        found = limits.find(each.pattern.replace("*", "0"))
        assert found is not None
        assert found.allowance is each.allowance


def test_no_limits_have_no_variables() -> None:
    assert ShareLimits().find("") is None
    assert HAMI_CORE.find("CUDA_DEVICE_MEMORY_LIMITS") is None
    assert HAMI_CORE.find("MY_CUDA_DISABLE_CONTROL") is None
