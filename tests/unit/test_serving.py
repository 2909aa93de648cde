"""Tests of mixed clusters, with HAMi on some nodes and NVIDIA's device plugin on others."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.both_calls import Webhook, patched
from tests.builders import LABELS, MODEL, Manifest, held_to, policy_for, required, requirement, term, vcuda_pod, view
from tests.tables import cases
from vcuda.placement.nodes import Nodes
from vcuda.placement.patches import PinSettings
from vcuda.placement.placement import HOSTNAME, MAX_AVOIDED, MAX_AVOIDED_LENGTH, reaches
from vcuda.placement.registers import Card, Registers
from vcuda.quota.model import Limit, Mode, NamespaceQuota
from vcuda.requests.config import parse_config
from vcuda.requests.resources import GpuResources

HAMI = {"hami": (Card("GPU-0", "NVIDIA A100"),)}
VGPU = {"vgpu-manager": (Card("GPU-1", "Tesla V100"),)}


def cluster(**nodes: tuple[str, Registers]) -> Nodes:
    """Return a cluster of nodes. Each has a model, and the cards in its register (a node annotation)."""
    labels = {name: {MODEL: model, HOSTNAME: f"host-{name}"} for name, (model, _) in nodes.items()}
    return Nodes.of(labels, LABELS, {name: register for name, (_, register) in nodes.items() if register})


SEPARATE = cluster(h1=("A100", HAMI), p1=("T4", {}), v1=("V100", VGPU))
"""A cluster in which the nodes of a model are alike: HAMi serves A100, NVIDIA's device plugin T4, and vgpu-manager
V100. No node has model L4.
"""
MIXED = cluster(h1=("A100", HAMI), p1=("A100", {}), h2=("A100", HAMI))

SETTINGS = parse_config(
    {
        "gpu_quota": "{}",
        "gpu_schemes": "{hami: {scheduler: hami-scheduler}, vgpu-manager: {scheduler: vgpu-scheduler}}",
    }
).resources
QUOTA = NamespaceQuota({model: Limit(800) for model in ("T4", "A100", "V100", "L4")})


def webhook(
    nodes: Nodes,
    *models: str,
    resources: GpuResources = SETTINGS,
    scheduler: str | None = None,
    mode: Mode = Mode.ENFORCE,
) -> Webhook:
    limits = {model: QUOTA.limits[model] for model in models or QUOTA.limits}
    policy = policy_for(NamespaceQuota(limits, mode=mode), nodes)
    return Webhook(replace(policy, resources=resources, pin_settings=PinSettings(LABELS, scheduler)))


WHOLE = {"nvidia.com/gpu": 1}
SHARE = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}
VGPU_SHARE = {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 3000}
MIG = {"nvidia.com/mig-1g.10gb": 1}
BY_CLASS = {"deviceclass.resource.kubernetes.io/gpu.nvidia.com": 1}
VCUDA = {"tencent.com/vcuda-core": 100}
IGNORED = {"labels": {"hami.io/webhook": "ignore"}}


def created(asked: Webhook, manifest: Manifest) -> tuple[str, str]:
    """Return the pod's model and scheduler after /mutate and /validate. A second /mutate must change nothing."""
    answer = asked.mutate(manifest)
    assert answer.allowed, answer.message
    stored = patched(manifest, answer.patch)
    assert list(asked.mutate(stored).patch) == []
    verdict = asked.validate(stored)
    assert verdict.allowed, verdict.message
    return verdict.model, stored["spec"].get("schedulerName", "")


@cases(
    "limits, fields, model, scheduler",
    whole_cards_on_plain_nodes=(WHOLE, {}, "T4", ""),
    whole_cards_held_to_plain_nodes=(WHOLE, {"nodeSelector": {MODEL: "T4"}}, "T4", ""),
    whole_cards_on_nodes_of_hami=(WHOLE, {"nodeSelector": {MODEL: "A100"}}, "A100", "hami-scheduler"),
    opted_out_on_plain_nodes=(WHOLE, IGNORED, "T4", ""),
    a_scheduler_of_its_own_on_plain_nodes=(WHOLE, {"schedulerName": "volcano"}, "T4", "volcano"),
    a_share=(SHARE, {}, "A100", "hami-scheduler"),
    a_share_that_opts_out=(SHARE, IGNORED, "A100", "hami-scheduler"),
    a_share_of_vgpu_manager=(VGPU_SHARE, {}, "V100", "vgpu-scheduler"),
    a_mig_slice=(MIG, {}, "A100", ""),
    a_device_by_its_class=(BY_CLASS, {}, "T4", ""),
    a_model_without_nodes=(WHOLE, {"nodeSelector": {MODEL: "L4"}}, "L4", "hami-scheduler"),
    a_share_on_a_model_without_nodes=(SHARE, {"nodeSelector": {MODEL: "L4"}}, "L4", "hami-scheduler"),
)
def test_a_pod_gets_the_scheduler_that_serves_the_nodes_of_its_model(
    limits: dict[str, int], fields: dict[str, Any], model: str, scheduler: str
) -> None:
    assert created(webhook(SEPARATE), vcuda_pod(limits, **fields)) == (model, scheduler)


def test_an_outdated_register_serves_nothing() -> None:
    labels = {name: {MODEL: "A100", HOSTNAME: f"host-{name}"} for name in ("h1", "h2")}
    outdated = {"h1": frozenset({"hami"})}
    both = Nodes.of(labels, LABELS, {"h1": HAMI, "h2": HAMI}, outdated=outdated)
    assert created(webhook(both, "A100"), vcuda_pod(WHOLE)) == ("A100", "hami-scheduler")
    assert created(webhook(both, "A100"), vcuda_pod(WHOLE, **IGNORED)) == ("A100", "")
    left = Nodes.of({"h1": labels["h1"]}, LABELS, {"h1": HAMI}, outdated=outdated)
    assert created(webhook(left, "A100"), vcuda_pod(WHOLE)) == ("A100", "")
    answer = webhook(left, "A100").mutate(vcuda_pod(SHARE))
    assert answer.message.endswith("A100 is excluded, because no node that the pod may use has a register of HAMi")


@cases(
    "limits, model, scheduler",
    of_no_scheme=(MIG, "A100", ""),
    by_class=(BY_CLASS, "T4", ""),
    plain_cards=(WHOLE, "T4", ""),
    vcuda=(VCUDA, "T4", "gpu-scheduler"),
)
def test_the_scheduler_of_the_flag_is_set_only_on_vcuda_pods(
    limits: dict[str, int], model: str, scheduler: str
) -> None:
    asked = webhook(SEPARATE, model, resources=GpuResources(), scheduler="gpu-scheduler")
    assert created(asked, vcuda_pod(limits)) == (model, scheduler)


def test_a_pod_that_no_node_of_its_models_can_serve_is_rejected_with_the_reason() -> None:
    answer = webhook(SEPARATE, "T4", "V100").mutate(vcuda_pod(SHARE))
    reason = "excluded, because no node that the pod may use has a register of HAMi"
    assert answer.message.endswith(f"T4 is {reason}; V100 is {reason}")


def test_without_any_register_in_the_cluster_a_share_may_use_every_model() -> None:
    assert created(webhook(cluster(p1=("T4", {})), "T4"), vcuda_pod(SHARE)) == ("T4", "hami-scheduler")


def test_a_share_excludes_no_node_because_its_scheduler_skips_the_others() -> None:
    answer = webhook(MIXED, "A100").mutate(vcuda_pod(SHARE))
    assert answer.patch[0]["value"] == held_to("A100")


@pytest.mark.parametrize("fields", [IGNORED, {"schedulerName": "volcano"}], ids=["opted out", "its own scheduler"])
def test_a_pod_with_its_own_scheduler_is_narrowed_to_the_plain_nodes_of_a_mixed_model(fields: dict[str, Any]) -> None:
    manifest = vcuda_pod(WHOLE, **fields)
    asked = webhook(MIXED, "A100")
    assert created(asked, manifest) == ("A100", fields.get("schedulerName", ""))
    stored = view(patched(manifest, asked.mutate(manifest).patch))
    assert not reaches(stored, MIXED, HOSTNAME, ["host-h1", "host-h2"])
    assert reaches(stored, MIXED, HOSTNAME, ["host-p1"])


def test_a_pod_that_neither_opts_out_nor_names_a_scheduler_uses_hami_on_a_mixed_model() -> None:
    assert created(webhook(MIXED, "A100"), vcuda_pod(WHOLE)) == ("A100", "hami-scheduler")


@pytest.mark.parametrize("fields", [IGNORED, {"schedulerName": "volcano"}], ids=["opted out", "its own scheduler"])
def test_a_pod_whose_narrowing_was_undone_is_rejected(fields: dict[str, Any]) -> None:
    """The pod could run on a node of HAMi, whose device plugin only serves pods that use HAMi's scheduler."""
    answer = webhook(MIXED, "A100").validate(vcuda_pod(WHOLE, affinity=held_to("A100"), **fields))
    assert "the pod's node selection allows nodes that its scheduler must not use" in answer.message


def test_a_pod_that_names_a_scheduler_of_its_own_gets_no_model_that_only_hami_serves() -> None:
    manifest = vcuda_pod(WHOLE, schedulerName="kai-scheduler")
    assert created(webhook(SEPARATE, "A100", "T4"), manifest) == ("T4", "kai-scheduler")
    assert created(webhook(SEPARATE, "A100", "L4"), manifest) == ("L4", "kai-scheduler")
    told = "A100 is excluded, because only hami-scheduler places pods on its nodes that the pod may use"
    assert webhook(SEPARATE, "A100").mutate(manifest).message.endswith(told)
    on_hami = {**manifest, "spec": {**manifest["spec"], "nodeSelector": {HOSTNAME: "host-h1"}}}
    assert webhook(MIXED, "A100").mutate(on_hami).message.endswith(told)


def test_a_pod_that_opts_out_or_names_a_scheduler_uses_hami_if_its_model_has_no_other_nodes() -> None:
    asked = webhook(SEPARATE, "A100")
    assert created(asked, vcuda_pod(WHOLE, **IGNORED)) == ("A100", "hami-scheduler")
    rejected = asked.validate(vcuda_pod(WHOLE, affinity=held_to("A100"), schedulerName="volcano"))
    assert "spec.schedulerName must be hami-scheduler or empty, because volcano may" in rejected.message


def test_a_pod_is_not_narrowed_by_more_names_than_fit_into_it() -> None:
    many = {f"h{number}": ("A100", HAMI) for number in range(MAX_AVOIDED + 1)}
    assert (
        created(webhook(cluster(p1=("A100", {}), **many), "A100"), vcuda_pod(WHOLE, **IGNORED))[1] == "hami-scheduler"
    )


@pytest.mark.parametrize("fields", [IGNORED, {"schedulerName": "volcano"}], ids=["opted out", "its own scheduler"])
def test_a_pod_is_not_narrowed_if_its_terms_would_repeat_too_many_names(fields: dict[str, Any]) -> None:
    """To exclude nodes, each term of the pod's node affinity gets the names of all excluded nodes."""
    host = "h" * 63
    labels = {f"h{n}": {MODEL: "A100", HOSTNAME: f"{host[:60]}{n:03}"} for n in range(MAX_AVOIDED)}
    nodes = Nodes.of({**labels, "p1": {MODEL: "A100", HOSTNAME: "host-p1"}}, LABELS, dict.fromkeys(labels, HAMI))
    asked = webhook(nodes, "A100")
    most = MAX_AVOIDED_LENGTH // (MAX_AVOIDED * len(host))
    several = term(requirement("zone", "Exists"))
    scheduler = fields.get("schedulerName", "")
    narrowed = vcuda_pod(WHOLE, affinity=required(*[several] * most), **fields)
    assert created(asked, narrowed) == ("A100", scheduler)
    stored = view(patched(narrowed, asked.mutate(narrowed).patch))
    assert not reaches(stored, nodes, HOSTNAME, [f"{host[:60]}000"])
    larger = vcuda_pod(WHOLE, affinity=required(*[several] * (most + 1)), **fields)
    answer = asked.mutate(larger)
    assert len(msgspec.json.encode(answer.patch)) < 1000 * (most + 1)
    if not scheduler:
        assert created(asked, larger) == ("A100", "hami-scheduler")
        return
    rejected = asked.validate(patched(larger, answer.patch))
    assert "spec.schedulerName must be hami-scheduler or empty, because volcano may" in rejected.message


def test_a_quota_that_only_warns_admits_a_pod_that_no_node_can_serve() -> None:
    assert webhook(SEPARATE, "T4", mode=Mode.WARN).mutate(vcuda_pod(SHARE)).outcome == "unpinned"
