"""Tests of runtime classes and environment variables by which a container could get a GPU without a request."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.both_calls import validated_on_m40
from tests.builders import Manifest, container, pod, sidecar
from tests.tables import cases
from vcuda.quota.allowances import Allowance
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.runtime_devices import DEVICE_VARIABLES, GPU_RUNTIME_CLASSES, RuntimeClasses, is_covered
from vcuda.requests.schemes import HAMI

CLASS = "deviceclass.resource.kubernetes.io/"
LEGACY = {"name": "CUDA_VERSION", "value": "12.4.1"}
VOID = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
CLAIM = {"name": "gpu", "resourceClaimName": "train"}
NAMES = {"renamed": "nvidia", "sandboxed": "kata-qemu-nvidia-gpu-snp", "plain": "runc", "nvidia-named": "runc"}


def rejected_paths(manifest: Manifest, *allow: Allowance, **policy: Any) -> list[str]:
    return [fault.path for fault in validated_on_m40(manifest, *allow, **policy).faults]


# Tests of runtime classes


@cases(
    "name",
    whole="nvidia",
    cdi="nvidia-cdi",
    legacy="nvidia-legacy",
    experimental="nvidia-experimental",
    kata="kata-qemu-nvidia-gpu",
    kata_without_qemu="kata-nvidia-gpu",
    confidential="kata-qemu-nvidia-gpu-tdx",
)
def test_every_class_of_nvidias_operator_and_toolkit_is_rejected_without_a_request(name: str) -> None:
    manifest = pod(container(), runtimeClassName=name)
    assert rejected_paths(manifest) == ["spec.runtimeClassName"]
    assert rejected_paths(manifest, Allowance.RUNTIME_CLASS) == []
    assert rejected_paths(pod(container({"nvidia.com/gpu": 1}), runtimeClassName=name)) == []


@pytest.mark.parametrize("name", ["kata", "kata-qemu", "gvisor", "my-nvidia", "nvidiax", "runc"])
def test_other_classes_are_admitted(name: str) -> None:
    assert not RuntimeClasses().gives_gpus(name)


@cases(
    "name, gives",
    by_its_handler=("renamed", True),
    by_the_handler_of_kata=("sandboxed", True),
    by_its_name_whatever_its_handler=("nvidia-named", True),
    another_handler=("plain", False),
    not_known_yet=("unknown", False),
    not_known_yet_and_named_so=("nvidia", True),
)
def test_a_class_is_judged_by_its_handler_and_by_its_name(name: str, *, gives: bool) -> None:
    classes = RuntimeClasses(GPU_RUNTIME_CLASSES, NAMES.get)
    assert classes.gives_gpus(name) is gives
    manifest = pod(container(), runtimeClassName=name)
    assert rejected_paths(manifest, runtime_classes=classes) == ["spec.runtimeClassName"] * gives


def test_an_administrators_patterns_replace_the_default() -> None:
    classes = RuntimeClasses(("acme-*", "fast?"))
    assert [name for name in ("acme-gpu", "fast1", "fast", "nvidia") if classes.gives_gpus(name)] == [
        "acme-gpu",
        "fast1",
    ]


# Tests of the environment variables by which container runtimes give devices to a container


@pytest.mark.parametrize("name", sorted(DEVICE_VARIABLES))
def test_the_variable_of_every_vendors_runtime_is_rejected_unless_it_gives_nothing(name: str) -> None:
    def manifest(**value: Any) -> Manifest:
        return pod(container({"nvidia.com/gpu": 1}), init=[container(env=[{"name": name, **value}])])

    giving: list[Manifest] = [{"value": "all"}, {"value": "0"}, {}, {"valueFrom": {"fieldRef": {}}}]
    for each in giving:
        assert rejected_paths(manifest(**each)) == ["spec.initContainers[0].env[0]"]
        assert rejected_paths(manifest(**each), Allowance.VISIBLE_DEVICES) == []
    for value in ("none", "void"):
        assert rejected_paths(manifest(value=value)) == []


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"]
)
def test_a_variable_by_which_a_framework_narrows_its_devices_is_admitted(name: str) -> None:
    assert rejected_paths(pod(container({"nvidia.com/gpu": 1}, env=[{"name": name, "value": "0"}]))) == []


@pytest.mark.parametrize("name", ["NVIDIA_MIG_CONFIG_DEVICES", "NVIDIA_MIG_MONITOR_DEVICES"])
def test_control_of_mig_is_rejected_even_in_a_container_with_a_gpu(name: str) -> None:
    variable = {"name": name, "value": "all"}
    assert rejected_paths(pod(container({"nvidia.com/gpu": 1}, env=[variable]))) == ["spec.containers[0].env[0]"]
    assert rejected_paths(pod(container({"nvidia.com/gpu": 1}, env=[variable])), Allowance.VISIBLE_DEVICES) == []
    assert rejected_paths(pod(container(env=[{"name": name}]))) == []


# Tests of old CUDA images

MIG = {"nvidia.com/mig-1g.5gb": 1}
REQUESTS: dict[str, Mapping[str, int]] = {
    "gpu-manager's share": {"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 10},
    "gpu-manager's cards": {"tencent.com/vcuda-core": 200},
    "nvidia-vcuda's share": {"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 100},
    "a card of NVIDIA's plugin or a vGPU of HAMi": {"nvidia.com/gpu": 1},
    "HAMi's share": {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 10, "nvidia.com/gpumem": 100},
    "vgpu-manager's share": {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": 10, "nvidia.com/vgpu-memory": 100},
    "a MIG partition": MIG,
    "a time slice": {"nvidia.com/gpu.shared": 1},
    "a device of a DeviceClass": {f"{CLASS}gpu.nvidia.com": 1},
}
"""The requests, by name, for which a device plugin or a CDI specification sets NVIDIA_VISIBLE_DEVICES."""


@pytest.mark.parametrize("limits", REQUESTS.values(), ids=REQUESTS)
def test_an_ordinary_gpu_container_may_set_cuda_version(limits: Mapping[str, int]) -> None:
    units = "{nvidia.com/gpu.shared: {cards: 0.25}}"
    assert rejected_paths(pod(container(limits, env=[LEGACY])), units=units) == []


def test_a_request_covers_cuda_version_only_if_the_vendors_device_plugin_sets_nvidia_visible_devices() -> None:
    count = str(HAMI.count)
    assert is_covered([count], BUILT_IN)
    silent = GpuResources((msgspec.structs.replace(HAMI, sets_visible_devices=False),))
    assert not is_covered([count], silent)


@pytest.mark.parametrize("limits", REQUESTS.values(), ids=REQUESTS)
def test_a_container_that_requests_no_gpu_itself_may_not_set_cuda_version(limits: Mapping[str, int]) -> None:
    units = "{nvidia.com/gpu.shared: {cards: 0.25}}"
    exposed = container(env=[LEGACY])
    for manifest, path in (
        (pod(container(limits), exposed), "spec.containers[1].env[0]"),
        (pod(container(limits), init=[exposed]), "spec.initContainers[0].env[0]"),
        (pod(container(limits), init=[sidecar(env=[LEGACY])]), "spec.initContainers[0].env[0]"),
    ):
        assert rejected_paths(manifest, units=units) == [path]
        assert rejected_paths(manifest, Allowance.VISIBLE_DEVICES, units=units) == []


@cases(
    "limits, units",
    nothing=({"cpu": "1"}, ""),
    none_of_a_card=({"nvidia.com/gpu": 0}, ""),
    a_device_that_is_no_gpu=({"nvidia.com/hostdev": 1}, ""),
    the_memory_of_a_share_alone=({"nvidia.com/gpumem": 100}, ""),
    another_vendors_card=({"amd.com/gpu": 1}, "{amd.com/gpu: {cards: 1}}"),
)
def test_a_request_for_which_no_plugin_of_nvidia_cards_is_called_does_not_permit_cuda_version(
    limits: Mapping[str, Any], units: str
) -> None:
    assert rejected_paths(pod(container(limits, env=[LEGACY])), units=units) == ["spec.containers[0].env[0]"]


@cases(
    "variables, rejected",
    void=([LEGACY, VOID], False),
    none=([{**VOID, "value": "none"}, LEGACY], False),
    empty=([{"name": "CUDA_VERSION"}], False),
    another_version=([{"name": "CUDA_VERSION_MAJOR", "value": "12"}], False),
    from_another_object=([{"name": "CUDA_VERSION", "valueFrom": {"fieldRef": {}}}], True),
    void_from_another_object=([LEGACY, {"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {}}}], True),
)
def test_cuda_version_is_rejected_unless_the_container_hides_the_cards(
    variables: list[Manifest], *, rejected: bool
) -> None:
    assert bool(rejected_paths(pod(container(env=variables)))) is rejected


def test_a_claim_does_not_permit_cuda_version_as_its_driver_is_not_known() -> None:
    """If NVIDIA_VISIBLE_DEVICES is void, the pod is admitted. The container still gets its claim's cards by CDI."""
    using = {"resources": {"claims": [{"name": "gpu"}]}}
    rejected = pod(container(env=[LEGACY], **using), resourceClaims=[CLAIM])
    assert "spec.containers[0].env[0]" in rejected_paths(rejected)
    assert "spec.containers[0].env[0]" not in rejected_paths(
        pod(container(env=[LEGACY, VOID], **using), resourceClaims=[CLAIM])
    )


def test_the_rejection_of_cuda_version_says_what_to_do() -> None:
    assert validated_on_m40(pod(container(env=[LEGACY]))).message == (
        "malformed GPU request: spec.containers[0].env[0]: CUDA_VERSION gives a container without a GPU "
        "resource all cards of its node. Remove CUDA_VERSION, or set NVIDIA_VISIBLE_DEVICES to void in the same "
        "container. Or ask your administrator to add `allow: [visible-devices]` to the quota of this namespace"
    )
