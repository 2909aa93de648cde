"""Tests of the command `check`, which predicts the webhook's decisions for manifests."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.builders import MODEL, ONE_CARD, POOL, Manifest, container, pod, vcuda_pod
from tests.match_conditions import declared
from tests.tables import cases
from tools.reference.sources import ROOT
from vcuda.quota.well_known import UNASKED_NAMESPACES
from webhook.cli import main

QUOTA = """
team-a: {quota: {M40: 8, P100: 2}}
team-b: {pool: [lab], quota: {A100: {cards: 4, memory: 160Gi}}}
team-w: {mode: warn, quota: {M40: 1}}
"""


Rows = list[dict[str, Any]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "quota.yaml").write_text(QUOTA)
    return tmp_path


def check(directory: Path, *manifests: Manifest, options: tuple[str, ...] = (), text: str | None = None) -> Result:
    path = directory / "pods.yaml"
    path.write_text(yaml.safe_dump_all(manifests) if text is None else text)
    quota = str(directory / "quota.yaml")
    return CliRunner().invoke(main, ["check", "--quota", quota, "-n", "team-a", *options, str(path)])


def rows(directory: Path, *manifests: Manifest, options: tuple[str, ...] = (), quota: str = QUOTA) -> Rows:
    """Return the objects in the JSON output of `check`. The exit status must be 1 exactly if one is rejected."""
    (directory / "quota.yaml").write_text(quota)
    result = check(directory, *manifests, options=("-o", "json", *options))
    found: Rows = json.loads(result.stdout)["objects"]
    assert result.exit_code == any(row["decision"] == "rejected" for row in found)
    return found


def decisions(directory: Path, *manifests: Manifest, options: tuple[str, ...] = (), quota: str = QUOTA) -> list[str]:
    """Return the number of pods, the decision and the model for each row of the command's output."""
    found = rows(directory, *manifests, options=options, quota=quota)
    return [f"{row['count']} {row['decision']} {row['model']}".strip() for row in found]


def node(directory: Path, **labels: str) -> tuple[str, str]:
    path = directory / "nodes.yaml"
    path.write_text(yaml.safe_dump({"kind": "Node", "metadata": {"name": "a", "labels": labels}}))
    return "--nodes", str(path)


def cards(number: int, **fields: Any) -> Manifest:
    return vcuda_pod({"tencent.com/vcuda-core": number * 100}, **fields)


def deployment(replicas: int, limits: dict[str, int], name: str = "train") -> Manifest:
    template = {"spec": {"containers": [container(limits)]}}
    return {"kind": "Deployment", "metadata": {"name": name}, "spec": {"replicas": replicas, "template": template}}


# Tests of the command's exit status. The function `decisions` also checks it.


def test_a_manifest_without_pods_is_no_failure(directory: Path) -> None:
    """If there are no pods, a message says so. An empty table would look as if all pods were admitted."""
    result = check(directory, text="{apiVersion: v1, kind: Service}")
    assert (result.exit_code, result.stdout.split()[0], result.stderr) == (0, "OBJECT", "no pods found\n")
    assert check(directory, cards(1)).stderr == ""


@pytest.mark.parametrize("text", ["{", "kind: Pod\non: 2024-13-45"])
def test_a_file_that_is_not_yaml_is_exit_status_2_with_its_name(directory: Path, text: str) -> None:
    result = check(directory, text=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {directory / 'pods.yaml'}: the text cannot be read as YAML: ")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"kind": "Pod", "spec": 5}, "spec must be a mapping"),
        ({"kind": "Pod"}, "the object has no pod spec"),
        ({"spec": {}}, "the document is not a Kubernetes object: kind is required"),
    ],
)
def test_a_malformed_object_fails_alone_with_exit_status_2(directory: Path, bad: Manifest, reason: str) -> None:
    result = check(directory, cards(1), bad, cards(1), options=("-o", "json"))
    assert result.exit_code == 2
    found = json.loads(result.stdout)["objects"]
    assert [row["decision"] for row in found] == ["admitted", "malformed", "admitted"]
    assert found[1]["reason"] == f"{directory / 'pods.yaml'}, document 2: {reason}"


SKIPPED = {"apiVersion": "example.com/v1", "kind": "Trainer", "metadata": {"name": "a"}}
ELSEWHERE = vcuda_pod(nodeSelector={"disk": "ssd"})
TEMPLATED = {**pod(container()), "spec": {**pod(container())["spec"]}}
TEMPLATED["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "absent"}]


@cases(
    "manifest, decision, reason",
    no_template=(SKIPPED, "skipped", "no pod template found"),
    nodes=(ELSEWHERE, "unknown", "the nodes that the pod selects by labels or names"),
    a_node=(vcuda_pod(nodeName="gpu-1"), "unknown", "the nodes that the pod selects"),
    a_claim_template=(TEMPLATED, "unknown", "ResourceClaimTemplate absent"),
)
def test_an_object_with_missing_information_fails_only_a_strict_check(
    directory: Path, manifest: Manifest, decision: str, reason: str
) -> None:
    row = rows(directory, manifest)[-1]
    assert row["decision"] == decision
    assert reason in row["reason"]
    assert check(directory, manifest, options=("--strict",)).exit_code == 1


def test_with_nodes_an_unknown_decision_becomes_known(directory: Path) -> None:
    nodes = node(directory, **{MODEL: "M40", "disk": "ssd"})
    assert decisions(directory, ELSEWHERE, options=nodes) == ["1 admitted M40"]


def test_each_template_of_a_custom_object_is_decided(directory: Path) -> None:
    template = {"spec": {"containers": [container(ONE_CARD)]}}
    replicas = {"Master": {"template": template}, "Worker": {"replicas": 10, "template": template}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "a"}}
    decided = rows(directory, {**job, "spec": {"pytorchReplicaSpecs": replicas}})
    found = [(row["object"].rpartition(".")[0], row["count"], row["decision"], row["model"]) for row in decided]
    assert found[0] == ("PyTorchJob/a spec.pytorchReplicaSpecs.Master", 1, "admitted", "M40")
    assert {row[0] for row in found[1:]} == {"PyTorchJob/a spec.pytorchReplicaSpecs.Worker"}
    assert [sum(row[1] for row in found if row[2] == word) for word in ("admitted", "rejected")] == [10, 1]


def test_a_template_without_a_count_is_decided_once_and_the_output_says_so(directory: Path) -> None:
    step = {"name": "train", "container": {"image": "train", "resources": {"limits": ONE_CARD}}}
    workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "a"}}
    (row,) = rows(directory, {**workflow, "spec": {"templates": [step]}})
    assert (row["count"], row["decision"]) == (1, "admitted")
    assert row["reason"].endswith("how many of these pods it creates, so only one pod is checked")


# Tests of the comparison with an edited quota


def compare(directory: Path, old: str, *options: str) -> Result:
    (directory / "old.yaml").write_text(old)
    paths = ("--old", str(directory / "old.yaml"), "--quota", str(directory / "quota.yaml"))
    return CliRunner().invoke(main, ["check", *paths, *options])


def test_the_changes_of_an_edit_are_shown_without_manifests(directory: Path) -> None:
    result = compare(directory, "{team-a: {quota: {M40: 4, P100: 2}}, team-b: {quota: {}}, gone: {quota: {M40: 1}}}")
    heading, *changes = [line.split() for line in result.stdout.splitlines()]
    assert (result.exit_code, heading) == (0, ["CHANGED", "OLD", "NEW"])
    assert ["team-a.quota.M40", "4", "cards", "8", "cards"] in changes
    assert "Warning: gone: the entry (M40: 1 card) is removed. No limit applies any more" in result.stderr


def test_the_changes_of_an_edit_are_json_for_scripts(directory: Path) -> None:
    found = json.loads(compare(directory, QUOTA.replace("M40: 8", "M40: 4"), "-o", "json").stdout)
    change = {"path": "team-a.quota.M40", "before": "4 cards", "after": "8 cards"}
    assert found == {"changes": [change], "warnings": [], "objects": []}


def test_an_edit_beyond_the_cards_of_the_nodes_gives_a_warning(directory: Path) -> None:
    nodes = node(directory, **{MODEL: "M40", "nvidia.com/gpu.count": "4"})
    told = compare(directory, QUOTA.replace("M40: 8", "M40: 4"), *nodes).stderr
    assert "team-a.quota.M40: the limit is raised from 4 cards to 8 cards, but the nodes have 4 cards" in told


def test_warnings_about_the_quota_are_printed_with_the_decisions(directory: Path) -> None:
    (directory / "quota.yaml").write_text("{kube-system: {quota: {M40: 1}}, team-a: {quota: {M40: 1}}}")
    result = check(directory, cards(1))
    assert (result.exit_code, result.stderr.startswith("Warning: kube-system: system namespace")) == (0, True)


def test_every_fault_of_a_bad_quota_is_printed(directory: Path) -> None:
    (directory / "quota.yaml").write_text("team-a: {quota: {M40: -1}, pools: [x]}")
    result = check(directory, cards(1))
    assert (result.exit_code, result.stdout) == (2, "")
    heading, *faults = result.stderr.splitlines()
    assert heading == "Error: the quota document is malformed:"
    assert [fault.split(":")[0] for fault in faults] == ["  team-a.quota.M40", "  team-a.pools"]


@cases(
    "arguments",
    nothing=["check"],
    no_manifest=["check", "--quota", "{quota}"],
    no_quota=["check", "{quota}"],
    a_missing_file=["check", "--quota", "{quota}", "missing.yaml"],
    an_unknown_output=["check", "--quota", "{quota}", "-o", "xml", "{quota}"],
)
def test_a_bad_argument_is_exit_status_2(directory: Path, arguments: list[str]) -> None:
    quota = str(directory / "quota.yaml")
    result = CliRunner().invoke(main, [argument.format(quota=quota) for argument in arguments])
    assert result.exit_code == 2


# Tests of the command's input


def test_manifests_are_read_from_standard_input(directory: Path) -> None:
    quota = str(directory / "quota.yaml")
    result = CliRunner().invoke(main, ["check", "--quota", quota, "-n", "team-a", "-"], input=yaml.safe_dump(cards(9)))
    assert result.exit_code == 1


def test_several_files_share_one_quota_and_options_may_be_environment_variables(directory: Path) -> None:
    two = directory / "two.yaml"
    two.write_text(yaml.safe_dump(cards(2)))
    env = {"VCUDA_QUOTA": str(directory / "quota.yaml"), "VCUDA_NAMESPACE": "team-a", "VCUDA_OUTPUT": "json"}
    result = CliRunner().invoke(main, ["check", *[str(two)] * 6], env=env)
    assert [row["decision"] for row in json.loads(result.stdout)["objects"]] == ["admitted"] * 5 + ["rejected"]


# Tests of decisions


@cases(
    "manifest, decided",
    within_quota=(cards(1), "1 admitted M40"),
    over_quota=(cards(9), "1 rejected M40"),
    the_model_that_the_pod_selects=(cards(1, nodeSelector={MODEL: "P100"}), "1 admitted P100"),
    a_model_that_the_quota_does_not_list=(cards(1, nodeSelector={MODEL: "A100"}), "1 rejected"),
    malformed=(vcuda_pod({"tencent.com/vcuda-core": 150}), "1 rejected"),
    no_GPU=(pod(container()), "1 no GPU"),
    not_limited=(cards(9, metadata={"namespace": "team-x"}), "1 not limited"),
    a_quota_that_only_warns=(cards(9, metadata={"namespace": "team-w"}), "1 admitted M40"),
    a_preset_nodeName=(cards(1, nodeName="gpu-1"), "1 unknown M40"),
    a_forged_allocation=(cards(1, annotations={"tencent.com/gpu-assigned": ""}), "1 admitted M40"),
    a_forged_mirror_pod=(cards(9, annotations={"kubernetes.io/config.mirror": ""}), "1 rejected M40"),
)
def test_a_pod_is_decided_as_the_webhook_decides_it(directory: Path, manifest: Manifest, decided: str) -> None:
    assert decisions(directory, manifest) == [decided]


def test_replicas_with_equal_decisions_share_a_row(directory: Path) -> None:
    """The eighth replica is admitted with a warning, so it has its own row."""
    found = rows(directory, deployment(12, ONE_CARD), quota="team-a: {quota: {M40: 8}}")
    only = "the only possible model"
    nearly = "the GPU quota is nearly used up: M40 in namespace team-a, 8 cards of 8 cards"
    full = "M40 in namespace team-a, requested: 1 card, used: 8 (8 pending), limited: 8, 1 more needed"
    assert [(row["count"], row["decision"], row["reason"]) for row in found] == [
        (7, "admitted", f"{only}, 8 cards of 8 cards free"),
        (1, "admitted", f"{only}, 1 card of 8 cards free; {nearly}"),
        (4, "rejected", f"exceeded quota: {full}"),
    ]


def test_replicas_fill_one_model_after_the_other(directory: Path) -> None:
    found = decisions(directory, deployment(11, ONE_CARD), deployment(0, ONE_CARD))
    assert found == ["7 admitted M40", "1 admitted M40", "1 admitted P100", "1 admitted P100", "1 rejected M40"]


def test_many_more_replicas_than_may_be_pending_at_once(directory: Path) -> None:
    """The bound on admitted pods that are not stored yet does not apply, because no API server stores these pods."""
    small = {"nvidia.com/vcuda-core": 1, "nvidia.com/vcuda-memory": 1}
    found = rows(directory, deployment(700, small), quota="team-a: {quota: {M40: 6}}")
    assert sum(row["count"] for row in found if row["decision"] == "admitted") == 600
    assert sum(row["count"] for row in found if row["decision"] == "rejected") == 100


def test_workloads_are_decided_together_with_those_before_them(directory: Path) -> None:
    found = decisions(directory, cards(8), cards(2), cards(1), cards(1, metadata={"namespace": "team-b"}))
    assert found == ["1 admitted M40", "1 admitted P100", "1 rejected M40", "1 admitted A100"]


def test_a_model_with_a_node_is_preferred_to_one_without(directory: Path) -> None:
    assert decisions(directory, cards(1), options=node(directory, **{MODEL: "P100"})) == ["1 admitted P100"]


def test_the_labels_and_the_scheduler_can_be_set(directory: Path) -> None:
    options = ("--model-label", "x/model", "--pool-label", "x/pool", "--scheduler-name", "gpu-scheduler")
    selects = {"nodeSelector": {"x/model": "P100", POOL: "elsewhere"}}
    (row,) = rows(directory, cards(1, **selects), options=options)
    assert row["model"] == "P100"
    assert "the webhook sets the pod's scheduler to gpu-scheduler" in row["reason"]


# Tests of the command's output


def test_json_has_every_field_of_a_row(directory: Path) -> None:
    half = vcuda_pod({"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 4})
    m40 = "M40 in namespace team-a, requested: 9 cards, used: 0.5 (0.5 pending), limited: 8, can never fit"
    p100 = "P100 in namespace team-a, requested: 9 cards, used: 0 (0 pending), limited: 2, can never fit"
    same = {"object": "Pod/train-0", "namespace": "team-a", "count": 1, "model": "M40"}
    free = "the first in the namespace's quota, 8 cards of 8 cards free"
    charged = {"decision": "admitted", "outcome": "charged", "rule": "document", "cards": 0.5, "memory_mib": 1024}
    rejected = {"decision": "rejected", "outcome": "over-quota", "rule": "", "cards": 9.0, "memory_mib": 0}
    assert rows(directory, half, cards(9)) == [
        {**same, **charged, "reason": free},
        {**same, **rejected, "reason": f"larger than the GPU quota: {m40}; {p100}"},
    ]


def test_the_table_has_the_same_in_columns(directory: Path) -> None:
    result = check(directory, cards(1), pod(container(), metadata={"name": "web"}))
    heading, first, second = result.stdout.splitlines()
    assert heading.split() == ["OBJECT", "NAMESPACE", "COUNT", "DECISION", "MODEL", "CHARGE", "REASON"]
    assert first.startswith("Pod/train-0  team-a     1      admitted  M40    1 card  ")
    assert second == "Pod/web      team-a     1      no GPU"
    assert first.index("admitted") == heading.index("DECISION") == second.index("no GPU")


def test_the_reason_names_the_changes(directory: Path) -> None:
    copied = {"hami.io/bind-time": "1", "mine": "stays", "tencent.com/gpu-assigned": "true"}
    (row,) = rows(directory, cards(1, annotations=copied, nodeName="gpu-1"))
    assert row["reason"].split("; ")[2:] == [
        "the webhook removes allocation records: hami.io/bind-time, tencent.com/gpu-assigned",
        "the webhook replaces the pod's nodeName by a required node affinity",
    ]


MISPLACED = (
    "annotation quota.vcuda.io/models has no effect on this object; write it into the annotations of its pod template"
)


@pytest.mark.parametrize(("placed", "warned"), [("outside", True), ("inside", False), ("both", False)])
def test_an_annotation_with_models_outside_the_pod_template_gives_a_warning(
    directory: Path, placed: str, *, warned: bool
) -> None:
    made = deployment(1, ONE_CARD)
    annotations = {"annotations": {"quota.vcuda.io/models": "P100"}}
    if placed != "inside":
        made["metadata"] |= annotations
    if placed != "outside":
        made["spec"]["template"]["metadata"] = annotations
    (row,) = rows(directory, made)
    assert row["model"] == ("M40" if placed == "outside" else "P100")
    assert (MISPLACED in row["reason"]) == warned


def test_a_quota_that_only_audits_prints_no_warning(directory: Path) -> None:
    (row,) = rows(directory, cards(2), quota="team-a: {mode: audit, quota: {M40: 1}}")
    reason = "over quota on every model, but the quota does not enforce its limits"
    assert (row["decision"], row["model"], row["reason"]) == ("admitted", "M40", reason)


@pytest.mark.parametrize("namespace", sorted(UNASKED_NAMESPACES))
@pytest.mark.parametrize("core", [100, 150, 900])
def test_pods_of_a_system_namespace_are_counted_and_never_rejected(directory: Path, namespace: str, core: int) -> None:
    """The API server does not call the webhook for pods of this namespace. So it stores even malformed pods."""
    replicas, quota = deployment(3, {"tencent.com/vcuda-core": core}), f"{namespace}: {{quota: {{M40: 1}}}}"
    (row,) = rows(directory, replicas, options=("-n", namespace), quota=quota)
    reason = "the webhook is not called for pods in this system namespace, so they are charged but never rejected"
    assert (row["count"], row["decision"], row["model"], row["reason"]) == (3, "counted", "", reason)


def test_a_system_namespace_without_an_entry_is_not_limited(directory: Path) -> None:
    found = decisions(directory, cards(1, metadata={"namespace": "kube-system"}), quota="'*': {quota: {}}")
    assert found == ["1 not limited"]


def test_the_system_namespaces_are_those_that_the_manifests_exclude() -> None:
    manifests = yaml.safe_load_all((ROOT / "manifests" / "base" / "registration.yaml").read_text(encoding="utf-8"))
    hooks = [hook for manifest in manifests for hook in declared(manifest) if "namespaceSelector" in hook]
    excluded = [hook["namespaceSelector"]["matchExpressions"] for hook in hooks]
    assert {frozenset(by_name["values"]) for by_name, _labelled_out in excluded} == {UNASKED_NAMESPACES}


def test_a_reason_of_a_quota_that_only_warns_is_printed_once(directory: Path) -> None:
    privileged = pod(container(securityContext={"privileged": True}), metadata={"namespace": "team-w"})
    (row,) = rows(directory, privileged)
    assert row["reason"].count("malformed GPU request") == 1
    assert row["reason"].endswith("the object is admitted, because this quota only warns")


def test_warnings_are_part_of_the_reason(directory: Path) -> None:
    (row,) = rows(directory, cards(2, metadata={"namespace": "team-w"}))
    assert row["reason"].endswith("limited: 1, can never fit; the object is admitted, because this quota only warns")
    assert row["decision"] == "admitted"


def test_the_limit_of_all_models_together_is_checked(directory: Path) -> None:
    quota = "team-a: {quota: {A100: 2, M40: 8}, total: 3}"
    assert decisions(directory, deployment(5, ONE_CARD), quota=quota) == [
        "1 admitted A100",
        "1 admitted A100",
        "1 admitted M40",
        "2 rejected M40",
    ]
    reason = rows(directory, deployment(5, ONE_CARD), quota=quota)[-1]["reason"]
    assert "exceeded quota: total in namespace team-a, requested: 1 card, used: 3" in reason
