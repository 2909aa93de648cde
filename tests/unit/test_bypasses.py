"""Tests of pods that could use more GPUs than they request.

Such a pod is rejected unless the quota has the `allow` for the field by which the pod gets the GPUs.
"""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from examples.claims import claim_policy
from tests.both_calls import Webhook, validated_on_m40
from tests.builders import Manifest, container, held_to, pod, policy_for, quota_faults, review, vcuda_pod, view
from tests.tables import cases
from vcuda.admission_review import AdmissionResponse
from vcuda.errors import MAX_FAULTS
from vcuda.placement.nodes import Nodes
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS
from vcuda.requests.bypasses import could_reach_gpus
from vcuda.requests.config import parse_config
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS, RuntimeClasses
from webhook.review.context import PolicySnapshot
from webhook.review.pod_review import read

LIMITS = {"M40": Limit(800)}
SHARE = {"nvidia.com/vcuda-core": 20, "nvidia.com/vcuda-memory": 100}
CARD = {"nvidia.com/gpu": 1}
HAMI_SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30, "nvidia.com/gpumem": 1000}
VGPU_SHARE = {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": 30, "nvidia.com/vgpu-memory": 1000}
CLASS = "deviceclass.resource.kubernetes.io/"
FIRST = "spec.containers[0]"
ENV = f"{FIRST}.env[1]"
PRIVILEGED = {"securityContext": {"privileged": True}}
HOST_PROCESS: Manifest = {"securityContext": {"windowsOptions": {"hostProcess": True}}}


def env(name: str, **value: Any) -> Manifest:
    return {"env": [{"name": "A", "value": "b"}, {"name": name, **value}]}


def by_env(name: str, value: str, limits: Mapping[str, int] | None = None) -> Manifest:
    return pod(container(limits, **env(name, value=value)))


def policy_note(value: str) -> dict[str, str]:
    return {"nvidia.com/vgpu-compute-policy": value}


def rejected(manifest: Manifest, *allow: Allowance, mode: Mode = Mode.ENFORCE) -> AdmissionResponse:
    webhook = Webhook(policy_for(NamespaceQuota(LIMITS, mode=mode, allow=frozenset(allow))))
    answers = [webhook.mutate(manifest), webhook.validate(manifest)]
    assert answers[0].outcome == answers[1].outcome
    return answers[1]


WITH_A_NAME = {
    "privileged": (pod(container(**PRIVILEGED)), f"{FIRST}.securityContext.privileged", Allowance.PRIVILEGED),
    "privileged with a card": (
        pod(container(CARD), container(**PRIVILEGED)),
        "spec.containers[1].securityContext.privileged",
        Allowance.PRIVILEGED,
    ),
    "privileged at the start": (
        pod(container(), init=[container(**PRIVILEGED)]),
        "spec.initContainers[0].securityContext.privileged",
        Allowance.PRIVILEGED,
    ),
    "a HostProcess container": (
        pod(container(**HOST_PROCESS)),
        f"{FIRST}.securityContext.windowsOptions.hostProcess",
        Allowance.PRIVILEGED,
    ),
    "a HostProcess pod": (
        pod(container(CARD), **HOST_PROCESS),
        "spec.securityContext.windowsOptions.hostProcess",
        Allowance.PRIVILEGED,
    ),
    "all devices": (by_env("NVIDIA_VISIBLE_DEVICES", "all"), ENV, Allowance.VISIBLE_DEVICES),
    "a listed device with a share": (by_env("NVIDIA_VISIBLE_DEVICES", "0", SHARE), ENV, Allowance.VISIBLE_DEVICES),
    "devices from a ConfigMap": (
        pod(container(), init=[container(**env("NVIDIA_VISIBLE_DEVICES", valueFrom={"configMapKeyRef": {}}))]),
        "spec.initContainers[0].env[1]",
        Allowance.VISIBLE_DEVICES,
    ),
    "another vendor's devices": (by_env("MTHREADS_VISIBLE_DEVICES", "all"), ENV, Allowance.VISIBLE_DEVICES),
    "a legacy CUDA image": (by_env("CUDA_VERSION", "12.4"), ENV, Allowance.VISIBLE_DEVICES),
    "control of MIG": (by_env("NVIDIA_MIG_CONFIG_DEVICES", "all", CARD), ENV, Allowance.VISIBLE_DEVICES),
    "a runtime class": (pod(container(), runtimeClassName="nvidia"), "spec.runtimeClassName", Allowance.RUNTIME_CLASS),
    "control of shares disabled": (by_env("CUDA_DISABLE_CONTROL", "false", CARD), ENV, Allowance.DISABLE_CONTROL),
    "control of vgpu-manager disabled": (by_env("DISABLE_VGPU_CONTROL", "true", CARD), ENV, Allowance.DISABLE_CONTROL),
    "cores without a limit": (by_env("GPU_CORE_UTILIZATION_POLICY", "DISABLE", SHARE), ENV, Allowance.CORE_POLICY),
    "a limit from another object": (
        pod(container(SHARE, **env("GPU_CORE_UTILIZATION_POLICY", valueFrom={}))),
        ENV,
        Allowance.CORE_POLICY,
    ),
    "another memory limit": (by_env("CUDA_DEVICE_MEMORY_LIMIT_0", "9m", HAMI_SHARE), ENV, Allowance.MEMORY_LIMIT),
    "another core limit": (by_env("CUDA_CORE_LIMIT", "100", VGPU_SHARE), ENV, Allowance.CORE_LIMIT),
    "another cache file": (by_env("CUDA_DEVICE_MEMORY_SHARED_CACHE", "/x", HAMI_SHARE), ENV, Allowance.LIMIT_LIBRARY),
    "another preload file": (
        pod(container(HAMI_SHARE, volumeMounts=[{"name": "v", "mountPath": "/etc/ld.so.preload", "subPath": "none"}])),
        f"{FIRST}.volumeMounts[0].mountPath",
        Allowance.LIMIT_LIBRARY,
    ),
    "a share without a limit": (
        vcuda_pod(SHARE, annotations=policy_note("None")),
        "metadata.annotations[nvidia.com/vgpu-compute-policy]",
        Allowance.COMPUTE_POLICY,
    ),
    "a fraction in capitals": (
        pod(container(), annotations={"GPU-Fraction": "0.5"}),
        "metadata.annotations[GPU-Fraction]",
        Allowance.GPU_FRACTION,
    ),
    "a fraction": (
        pod(container(), annotations={"gpu-fraction": "0.5"}),
        "metadata.annotations[gpu-fraction]",
        Allowance.GPU_FRACTION,
    ),
    **{
        f"devices by {domain}": (
            pod(container(), annotations={f"{domain}/container.main": "nvidia.com/gpu=all"}),
            f"metadata.annotations[{domain}/container.main]",
            Allowance.VISIBLE_DEVICES,
        )
        for domain in DEVICE_ANNOTATIONS
    },
    "devices of all containers": (
        pod(container(CARD), annotations={"devices.nri.io": "- path: /dev/nvidia1"}),
        "metadata.annotations[devices.nri.io]",
        Allowance.VISIBLE_DEVICES,
    ),
    "a part of the memory": (
        pod(container(CARD), annotations={"gpu-memory": "2000"}),
        "metadata.annotations[gpu-memory]",
        Allowance.GPU_MEMORY,
    ),
}


@cases("manifest, path, allowance", **WITH_A_NAME)
def test_access_beyond_the_charge_is_rejected_unless_allowed(
    manifest: Manifest, path: str, allowance: Allowance
) -> None:
    stored = {**manifest, "spec": {**manifest["spec"], "affinity": held_to("M40")}}
    answer = rejected(stored)
    assert (answer.outcome, answer.status) == ("malformed", HTTPStatus.UNPROCESSABLE_ENTITY)
    assert [fault.path for fault in answer.faults] == [path]
    assert rejected(stored, *(set(Allowance) - {allowance})).status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert validated_on_m40(manifest, allowance).outcome in ("ignored", "charged")


@cases(
    "seconds, mode, outcome",
    the_longest=(MAX_TERMINATING_SECONDS, Mode.ENFORCE, "charged"),
    too_long=(MAX_TERMINATING_SECONDS + 1, Mode.ENFORCE, "malformed"),
    too_long_under_mode_warn=(MAX_TERMINATING_SECONDS + 1, Mode.WARN, "charged"),
)
def test_a_grace_period_beyond_the_longest_charge_is_rejected_with_the_figure(
    seconds: int, mode: Mode, outcome: str
) -> None:
    manifest = vcuda_pod(CARD, affinity=held_to("M40"), terminationGracePeriodSeconds=seconds)
    answer = Webhook(policy_for(NamespaceQuota(LIMITS, mode=mode))).validate(manifest)
    assert answer.outcome == outcome
    told = "spec.terminationGracePeriodSeconds: must be at most 600 (--max-terminating-seconds)"
    assert (told in f"{answer.message}{answer.warnings}") is (seconds > MAX_TERMINATING_SECONDS)
    plain = pod(container({"rdma/hca": 1}), terminationGracePeriodSeconds=seconds)
    assert Webhook(policy_for(NamespaceQuota(LIMITS))).validate(plain).outcome == "ignored"


def test_a_pod_whose_deletion_would_keep_its_claims_is_rejected() -> None:
    manifest = vcuda_pod(CARD, affinity=held_to("M40"), metadata={"finalizers": ["example.com/other", "orphan"]})
    answer = Webhook(policy_for(NamespaceQuota(LIMITS))).validate(manifest)
    assert (answer.outcome, "metadata.finalizers: must not contain orphan" in answer.message) == ("malformed", True)
    plain = pod(container({"rdma/hca": 1}), metadata={"finalizers": ["orphan"]})
    assert Webhook(policy_for(NamespaceQuota(LIMITS))).validate(plain).outcome == "ignored"


@pytest.mark.parametrize(
    ("resource", "name"), [("nvidia.com/gpu.shared", "nvidia.com/gpu.shared"), (f"{CLASS}a.b", "deviceclass/a.b")]
)
def test_an_unknown_gpu_resource_is_rejected_with_the_line_to_add(resource: str, name: str) -> None:
    assert rejected(vcuda_pod({resource: 9}), *Allowance).message == (
        f"malformed GPU request: {FIRST}.resources.limits[{resource}]: unknown GPU resource: no value is configured "
        f"for it. Ask your administrator to add a line to `gpu_units` in the quota ConfigMap: `{name}: {{cards: 1}}` "
        f"with the number of cards of one unit, or `{name}: {{}}` if the resource is not a GPU"
    )


def test_a_class_without_a_fixed_value_is_rejected_with_an_alternative() -> None:
    assert rejected(vcuda_pod({f"{CLASS}mig.nvidia.com": 1}), *Allowance).message == (
        f"malformed GPU request: {FIRST}.resources.limits[{CLASS}mig.nvidia.com]: the charge depends on the MIG "
        "profile. Request nvidia.com/mig-<profile>, or use a ResourceClaim"
    )


def test_a_resource_claim_is_rejected_with_any_permission() -> None:
    answer = rejected(pod(container(), resourceClaims=[{"name": "gpu", "resourceClaimName": "x"}]), *Allowance)
    assert [fault.path for fault in answer.faults] == ["spec.resourceClaims"]


@cases(
    "manifest",
    no_devices=by_env("NVIDIA_VISIBLE_DEVICES", "none"),
    a_card_by_its_runtime=vcuda_pod(CARD, runtimeClassName="nvidia"),
    another_runtime=pod(container(), runtimeClassName="kata"),
    a_limit_that_holds=by_env("GPU_CORE_UTILIZATION_POLICY", "force", SHARE),
    a_whole_card_without_one=by_env("GPU_CORE_UTILIZATION_POLICY", "disable", CARD),
    a_switch_without_a_card=by_env("CUDA_DISABLE_CONTROL", "true"),
    a_balanced_share=vcuda_pod(SHARE, annotations=policy_note("balance")),
    a_whole_card_of_no_policy=vcuda_pod(CARD, annotations=policy_note("none")),
    another_plugins_annotation=pod(container(CARD), annotations={"cdi.kubevirt.io/storage.import": "1"}),
    not_privileged=pod(container(CARD, securityContext={"privileged": False})),
    no_host_process=pod(container(securityContext={"windowsOptions": {"hostProcess": False}}), securityContext={}),
    somebody_elses_resource=pod(container({"rdma/hca": 1})),
    driver_libraries=by_env("NVIDIA_DRIVER_CAPABILITIES", "all"),
    a_constraint_on_the_driver=by_env("NVIDIA_REQUIRE_CUDA", "cuda>=12"),
    a_limit_without_a_gpu=by_env("CUDA_DEVICE_MEMORY_LIMIT", "1g"),
    none_of_an_unknown_one=pod(container({"nvidia.com/gpu.shared": 0})),
)
def test_a_field_that_gives_no_access_beyond_the_charge_is_admitted(manifest: Manifest) -> None:
    assert validated_on_m40(manifest).outcome in ("ignored", "charged")


@pytest.mark.parametrize(("mode", "told"), [(Mode.WARN, 1), (Mode.AUDIT, 0)])
@pytest.mark.parametrize("manifest", [pod(container({"amd.com/gpu": 1})), pod(container(**PRIVILEGED))])
def test_a_quota_that_does_not_enforce_admits_and_reports_it(manifest: Manifest, mode: Mode, told: int) -> None:
    """In mode warn the owner of the pod gets a warning. In mode audit the reason is only logged."""
    answer = rejected(manifest, mode=mode)
    assert (answer.outcome, answer.allowed, len(answer.warnings)) == ("malformed", True, told)
    assert answer.message.startswith("malformed GPU request: ")


@pytest.mark.parametrize("manifest", [row[0] for row in WITH_A_NAME.values()])
def test_pods_of_unlimited_namespaces_are_not_checked(manifest: Manifest) -> None:
    verdict = read(review(manifest), PolicySnapshot(Quota(), Nodes()))
    assert isinstance(verdict, AdmissionResponse)
    assert verdict.outcome in ("ignored", "unlimited")
    assert could_reach_gpus(view(manifest))


def test_configured_runtime_classes_are_checked_too() -> None:
    quota = "team-a: {quota: {M40: 8}}"
    read = parse_config({"gpu_quota": quota})
    classes = RuntimeClasses(("fast",))
    policy = PolicySnapshot(read.quota, Nodes(), resources=read.resources, runtime_classes=classes)
    answer = Webhook(policy).validate(pod(container({"acme.com/gpu-x": 1}), runtimeClassName="fast"))
    assert [fault.path for fault in answer.faults] == [
        "spec.runtimeClassName",
        f"{FIRST}.resources.limits[acme.com/gpu-x]",
    ]
    assert Webhook(policy).validate(pod(container(), runtimeClassName="nvidia")).outcome == "ignored"


def test_a_runtime_class_with_a_claim_is_rejected_with_a_reason_that_is_true_of_claims() -> None:
    claiming = pod(container(), resourceClaims=[{"name": "gpu"}], runtimeClassName="nvidia")
    policy = policy_for(NamespaceQuota({"M40": Limit(800)}))
    reason = Webhook(msgspec.structs.replace(policy, claims=claim_policy())).validate(claiming).message
    assert "runtime class nvidia may give the pod GPUs in addition to those of its ResourceClaims. Remove" in reason
    assert "requests none" not in reason


@pytest.mark.parametrize(
    ("allow", "fault"),
    [
        ("[privilegd]", '[0]: unsupported value: "privilegd"; did you mean `privileged`?'),
        ("[3]", f"[0]: unsupported value: 3; supported values: {', '.join(Allowance)}"),
        ("privileged", ': must be a list, for example [privileged]; got "privileged"'),
    ],
)
def test_an_unknown_name_is_a_fault(allow: str, fault: str) -> None:
    assert list(map(str, quota_faults(f"team-a: {{allow: {allow}}}"))) == [f"team-a.allow{fault}"]


def test_a_pod_with_very_many_resources_is_checked_in_linear_time() -> None:
    """A comparison of each resource of the pod with all others would take a minute here."""
    answer = rejected(vcuda_pod({"nvidia.com/gpumem": 1, **{f"nvidia.com/x{number}": 1 for number in range(20_000)}}))
    assert (answer.outcome, len(answer.faults)) == ("malformed", MAX_FAULTS + 1)
