"""Tests of `kubectl gpuquota why`: the last rejection, the decision now, and the pods that must end first."""

import json
from typing import Any, cast

import pytest

from controller.plugin.kubectl import Kubectl
from controller.plugin.why import KINDS, explain_why, parse_object
from examples.claims import NVIDIA, template
from tests.builders import Manifest, container
from tests.gpuquota import Cluster, run
from tests.tables import cases
from tests.unit.test_plugin_rejections import DENIED, event, store
from vcuda.claims.names import API_PATH
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.errors import ApiError
from vcuda.quota.model import Charge, Limit, Usage
from vcuda.quota.shortage import Shortage, exceeded
from vcuda.quota.well_known import UNSTORED_CAUSE

TEAM = "/namespaces/team-a"
TEMPLATE = {"metadata": {"labels": {"app": "train"}}, "spec": {"containers": [container({"nvidia.com/gpu": "2"})]}}


def deployment(cluster: Cluster) -> None:
    """Store a Deployment with its ReplicaSet, and a ReplicaSet of another Deployment."""
    about = {"apiVersion": "apps/v1", "kind": "Deployment"}
    metadata = {"name": "train", "namespace": "team-a", "uid": "uid-train"}
    cluster.store(
        f"/apis/apps/v1{TEAM}/deployments/train", {**about, "metadata": metadata, "spec": {"template": TEMPLATE}}
    )
    for name, owner in (("train-abc", "uid-train"), ("other-abc", "uid-other")):
        owners = [{"uid": owner, "kind": "Deployment", "name": "x", "apiVersion": "apps/v1"}]
        found = {"metadata": {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "ownerReferences": owners}}
        cluster.store(f"/apis/apps/v1{TEAM}/replicasets/{name}", found)


def why(named: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = run("-n", "team-a", "why", named, "-o", "json", *options)
    return done.exit_code, json.loads(done.stdout)


def shortage(model: str, asked: Charge, used: Charge, limit: Limit) -> Shortage:
    return Shortage(model, asked, Usage(used, Charge()), limit)


CARDS = shortage("H100", Charge(200, 0), Charge(700, 0), Limit(800, None))
OVER = exceeded("team-a", CARDS)


def test_a_rejected_deployment_shows_the_present_decision_and_the_pods_that_use_cards(
    cluster: Cluster,
) -> None:
    deployment(cluster)
    store(cluster, event(1, DENIED + OVER, name="train-abc", count=4), event(2, DENIED + OVER, name="other-abc"))
    holders = [{"name": "big", "cores": 400, "memory": 0}, {"name": "small", "cores": 300, "memory": 0}]
    cluster.publish("team-a", {"model": "H100", "limit": 8, "used": 7, "pending": 0, "available": 1, "pods": holders})
    cluster.rejection = ApiError(403, OVER)
    status, found = why("deploy/train")
    assert status == 1
    assert [(each["kind"], each["name"], each["count"]) for each in found["rejected"]] == [
        ("ReplicaSet", "train-abc", 4)
    ]
    assert [each["decision"] for each in found["now"]] == ["rejected"]
    [missing] = found["missing"]
    assert (missing["model"], missing["needed"]) == ("H100", 1)
    assert [each["name"] for each in missing["held_by"]] == ["big", "small"]
    assert run("-n", "team-a", "why", "deployment/train").stdout.splitlines() == [
        "Deployment/train in namespace team-a",
        "",
        "Rejected in the last hour:",
        f"  2026-01-01T00:00:01Z  ReplicaSet/train-abc, 4 times: {OVER}",
        "",
        "Now:",
        f"  Deployment/train rejected: {OVER} (HTTP 403)",
        "",
        "1 card of H100 must become free before the request fits",
        "  HELD BY  NAME   CARDS  MEMORY MiB",
        "  pod      big    4",
        "  pod      small  3",
    ]


@cases(
    "surge, holder, waiting, hinted",
    an_old_pod_holds_the_quota=("25%", "train-old-x1", "train-abc", True),
    without_surge_the_old_pod_is_deleted_first=(0, "train-old-x1", "train-abc", False),
    another_workload_holds_the_quota=("25%", "other-x1", "train-abc", False),
    the_newest_pods_hold_the_quota=("25%", "train-abc-x1", "train-abc", False),
)
def test_a_rollout_that_waits_for_its_own_old_pod_is_explained(
    cluster: Cluster, surge: str | int, holder: str, waiting: str, hinted: bool
) -> None:
    deployment(cluster)
    stored = cluster.objects[f"/apis/apps/v1{TEAM}/deployments/train"]
    stored["spec"]["strategy"] = {"rollingUpdate": {"maxSurge": surge}}
    owners = [{"uid": "uid-train", "kind": "Deployment", "name": "x", "apiVersion": "apps/v1"}]
    for name in ("train-old", "train-abc"):
        metadata = {"name": name, "namespace": "team-a", "uid": f"uid-{name}", "ownerReferences": owners}
        found: Manifest = {"metadata": metadata, "spec": {"replicas": 1}}
        found["status"] = {"replicas": int(name != waiting)}
        cluster.store(f"/apis/apps/v1{TEAM}/replicasets/{name}", found)
    holders = [{"name": holder, "cores": 700, "memory": 0}]
    cluster.publish("team-a", {"model": "H100", "limit": 8, "used": 7, "pending": 0, "available": 1, "pods": holders})
    cluster.rejection = ApiError(403, OVER)
    shown = run("-n", "team-a", "why", "deployment/train").stdout
    assert ("train-old-x1, an old pod of this Deployment, holds quota" in shown) is hinted
    assert ("maxSurge: 0" in shown) is hinted


def test_charged_pods_that_are_not_created_are_explained(cluster: Cluster) -> None:
    deployment(cluster)
    figures = {"model": "H100", "limit": 8, "used": 7, "pending": 7, "available": 1, "unstored": 6.0}
    cluster.publish("team-a", figures)
    cluster.rejection = ApiError(403, OVER)
    hint = f"cards of namespace team-a are charged to pods that are not created (6 of H100): {UNSTORED_CAUSE}"
    assert run("-n", "team-a", "why", "deployment/train").stdout.splitlines()[-2:] == ["", hint]


@cases(
    "short, sentence",
    a_share=(
        shortage("T4", Charge(50, 0), Charge(780, 0), Limit(800, None)),
        "0.3 cards of T4 must become free before the request fits",
    ),
    memory=(
        shortage("A100", Charge(100, 4096), Charge(100, 8192), Limit(None, 10240)),
        "2048 MiB of A100 must become free before the request fits",
    ),
    never=(
        shortage("L40S", Charge(900, 0), Charge(), Limit(800, None)),
        "the request for L40S is larger than the limit, so it never fits, even if other pods end",
    ),
)
def test_the_missing_quota_is_shown_for_each_model_of_a_rejection(
    cluster: Cluster, short: Shortage, sentence: str
) -> None:
    deployment(cluster)
    cluster.rejection = ApiError(403, exceeded("team-a", CARDS, short))
    found = explain_why(cast("Kubectl", cluster), KINDS["deployment"], "train", "team-a", lambda: None)
    assert [each.sentence() for each in found.missing] == [
        "1 card of H100 must become free before the request fits",
        sentence,
    ]


@cases(
    "kind, spec, status, text",
    deployment=(
        "Deployment",
        {"replicas": 4},
        {"observedGeneration": 2, "replicas": 4, "updatedReplicas": 4},
        "all pods exist that the workload wants now: 4",
    ),
    rollout=("Deployment", {"replicas": 4}, {"observedGeneration": 2, "replicas": 5, "updatedReplicas": 3}, None),
    old_pods=("Deployment", {"replicas": 4}, {"observedGeneration": 2, "replicas": 4}, None),
    not_observed=("Deployment", {"replicas": 4}, {"observedGeneration": 1, "replicas": 4}, None),
    scaled_to_zero=("Deployment", {"replicas": 0}, {"observedGeneration": 2, "replicas": 0}, None),
    running_job=("Job", {"parallelism": 3}, {"active": 3}, "all pods exist that the workload wants now: 3"),
    last_pods=("Job", {"parallelism": 3, "completions": 9}, {"active": 1, "succeeded": 8}, "all pods exist that the"),
    ended_job=("Job", {"parallelism": 3, "completions": 9}, {"succeeded": 9}, "all pods of the Job have succeeded"),
    short_job=("Job", {"parallelism": 3, "completions": 9}, {"active": 1}, None),
)
def test_a_workload_with_all_its_pods_is_not_called_rejected_for_an_old_event(
    cluster: Cluster, kind: str, spec: Manifest, status: Manifest, text: str | None
) -> None:
    api, plural = ("batch", "jobs") if kind == "Job" else ("apps", "deployments")
    metadata = {"name": "train", "namespace": "team-a", "uid": "uid-train", "generation": kind == "Deployment" and 2}
    stored = {"kind": kind, "apiVersion": f"{api}/v1", "metadata": metadata, "status": status}
    cluster.store(f"/apis/{api}/v1{TEAM}/{plural}/train", {**stored, "spec": {**spec, "template": TEMPLATE}})
    about = {"kind": kind, "namespace": "team-a", "name": "train"}
    store(cluster, event(1, DENIED + OVER, name="train", involvedObject=about))
    cluster.rejection = ApiError(403, OVER)
    told, found = why(f"{kind}/train")
    assert len(found["rejected"]) == 1
    if text is None:
        assert (told, [each["decision"] for each in found["now"]]) == (1, ["rejected"])
        return
    [now] = found["now"]
    assert (told, now["decision"], found["missing"]) == (0, "admitted", [])
    assert now["reason"].startswith(text)
    shown = run("-n", "team-a", "why", f"{kind}/train").stdout
    assert shown.endswith(f"Now:\n  {kind}/train admitted: {now['reason']}\n")
    assert shown.index("Rejected in the last hour:") < shown.index("Now:")


def test_a_workload_that_would_be_admitted_now_waits_for_nothing(cluster: Cluster) -> None:
    deployment(cluster)
    status, found = why("deployments/train")
    assert (status, found["rejected"], found["missing"]) == (0, [], [])
    assert [each["decision"] for each in found["now"]] == ["admitted"]


def test_the_claims_that_a_workload_would_get_are_decided_too(cluster: Cluster) -> None:
    """A rejection of the pod does not name its claims, because the webhook does not judge its claim templates."""
    deployment(cluster)
    spec = {"containers": [container()], "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}
    path = f"/apis/apps/v1{TEAM}/deployments/train"
    cluster.store(path, {**json.loads(cluster.get(path)), "spec": {"template": {"spec": spec}}})
    cluster.store(f"{API_PATH}{TEAM}/resourceclaimtemplates/one", {**template(), "metadata": {"name": "one"}})
    cluster.store(API_PATH, {"kind": "APIResourceList"})
    cluster.rejections = {f"{API_PATH}{TEAM}/resourceclaims": ApiError(403, OVER)}
    status, found = why("deployment/train")
    assert status == 1
    assert [(each["object"], each["decision"]) for each in found["now"]] == [
        ("Deployment/train", "admitted"),
        ("ResourceClaim/train-*-gpu-*", "rejected"),
    ]
    assert [(each["model"], each["needed"]) for each in found["missing"]] == [("H100", 1)]


def pod(cluster: Cluster, *claims: Manifest, **status: object) -> None:
    metadata: Manifest = {"name": "train-0", "namespace": "team-a", "annotations": {"quota.vcuda.io/model": "M40"}}
    spec = {"resourceClaims": claims} if claims else {}
    cluster.store(f"/api/v1{TEAM}/pods/train-0", {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status})


def test_the_state_of_a_stored_pod_shows_what_it_waits_for(cluster: Cluster) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient gpu."}
    pod(cluster, phase="Pending", conditions=[condition])
    status, found = why("pod/train-0")
    assert status == 0
    exists, waits = "the pod exists in phase Pending; the pod is pinned to M40", "the scheduler has not placed the pod"
    assert found["now"][0]["reason"] == f"{exists}; {waits}: 0/3 nodes are available: 3 Insufficient gpu."
    assert cluster.asked == []


def test_the_claims_of_a_stored_pod_are_shown_with_their_models_and_devices(cluster: Cluster) -> None:
    pinned = {"selectors": [{"cel": {"expression": write_pin(ClaimPin(NVIDIA, ("a100",)))}}]}
    requests = [{"name": "r0", "exactly": {"deviceClassName": NVIDIA, **pinned}}]
    given = {"devices": {"results": [{"request": "r0", "driver": NVIDIA, "pool": "n1", "device": "gpu-3"}]}}
    for name, allocated in (("train-0-gpu-x", {"allocation": given}), ("own", {}), ("extended-y", {})):
        stored = {"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}, "status": allocated}
        cluster.store(f"{API_PATH}{TEAM}/resourceclaims/{name}", stored)
    pod(
        cluster,
        {"name": "gpu", "resourceClaimTemplateName": "one"},
        {"name": "shared", "resourceClaimName": "own"},
        {"name": "lost", "resourceClaimName": "gone"},
        {"name": "unneeded", "resourceClaimTemplateName": "none"},
        phase="Pending",
        resourceClaimStatuses=[{"name": "gpu", "resourceClaimName": "train-0-gpu-x"}, {"name": "unneeded"}],
        extendedResourceClaimStatus={"resourceClaimName": "extended-y"},
    )
    cluster.publish("team-a", {"model": "A100", "limit": 8, "used": 1, "pending": 0, "available": 7})
    status, found = why("pod/train-0")
    assert status == 1
    waits = "the claim exists; the claim is pinned to A100; it has no device yet"
    assert [(each["object"], each["decision"], each["reason"]) for each in found["now"][1:]] == [
        (
            "ResourceClaim/train-0-gpu-x",
            "admitted",
            "the claim exists; the claim is pinned to A100; it has gpu-3 of pool n1",
        ),
        ("ResourceClaim/own", "admitted", waits),
        ("ResourceClaim/gone", "not asked", "the pod waits for this claim, which does not exist"),
        ("ResourceClaim/extended-y", "admitted", waits),
    ]
    assert cluster.asked == []


def test_a_claim_that_a_stored_pod_waits_for_is_tried_and_its_missing_quota_is_shown(cluster: Cluster) -> None:
    pod(cluster, {"name": "gpu", "resourceClaimTemplateName": "one"}, phase="Pending")
    cluster.store(f"{API_PATH}{TEAM}/resourceclaimtemplates/one", {**template(), "metadata": {"name": "one"}})
    cluster.store(API_PATH, {"kind": "APIResourceList"})
    cluster.rejections = {f"{API_PATH}{TEAM}/resourceclaims": ApiError(403, OVER)}
    status, found = why("pod/train-0")
    assert status == 1
    assert [(each["object"], each["decision"]) for each in found["now"]] == [
        ("Pod/train-0", "admitted"),
        ("ResourceClaim/train-0-gpu-*", "rejected"),
    ]
    assert [(each["model"], each["needed"]) for each in found["missing"]] == [("H100", 1)]


def test_a_pending_pod_of_a_workload_says_which_rejected_claim_it_cannot_start_without(cluster: Cluster) -> None:
    deployment(cluster)
    pod(cluster, {"name": "gpu", "resourceClaimTemplateName": "one"}, phase="Pending")
    stored = cluster.objects[f"/api/v1{TEAM}/pods/train-0"]
    stored["metadata"]["ownerReferences"] = [{"uid": "uid-train-abc", "kind": "ReplicaSet", "name": "train-abc"}]
    cluster.store(f"{API_PATH}{TEAM}/resourceclaimtemplates/one", {**template(), "metadata": {"name": "one"}})
    cluster.store(API_PATH, {"kind": "APIResourceList"})
    cluster.rejections = {f"{API_PATH}{TEAM}/resourceclaims": ApiError(403, OVER)}
    status, found = why("deployment/train")
    first, claim, *_ = found["now"]
    assert (status, first["object"]) == (1, "Pod/train-0")
    assert first["reason"].endswith("; the pod cannot start without ResourceClaim/train-0-gpu-*")
    assert (claim["object"], claim["decision"]) == ("ResourceClaim/train-0-gpu-*", "rejected")
    assert OVER in claim["reason"]


@cases(
    "model, reason, hinted",
    another_model=("L4", "the next in the namespace's quota after M40 (its node is cordoned)", True),
    the_same_model=("M40", "the first in the namespace's quota", False),
    another_model_for_lack_of_quota=("L4", "the next in the namespace's quota after M40 (not enough quota)", False),
)
def test_the_pending_pods_of_a_workload_are_looked_at_first(
    cluster: Cluster, model: str, reason: str, hinted: bool
) -> None:
    deployment(cluster)
    cluster.pinned_to, cluster.warnings = model, (f"would be pinned to {model}: {reason}",)
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 cordoned."}
    for name, owner, phase, fields in (
        ("train-2", "uid-train-abc", "Pending", {"creationTimestamp": "2026-01-01T00:00:02Z"}),
        ("train-1", "uid-train-abc", "Pending", {"creationTimestamp": "2026-01-01T00:00:01Z"}),
        ("train-0", "uid-train-abc", "Running", {}),
        ("train-9", "uid-train-abc", "Pending", {"deletionTimestamp": "2026-01-01T00:00:01Z"}),
        ("other-1", "uid-other-abc", "Pending", {}),
    ):
        owners = [{"uid": owner, "kind": "ReplicaSet", "name": "x", "apiVersion": "apps/v1"}]
        metadata: Manifest = {"name": name, "namespace": "team-a", "ownerReferences": owners, **fields}
        metadata["annotations"] = {"quota.vcuda.io/model": "M40"}
        stored = {"kind": "Pod", "metadata": metadata, "status": {"phase": phase, "conditions": [unplaced]}}
        cluster.store(f"/api/v1{TEAM}/pods/{name}", stored)
    status, found = why("deployment/train")
    assert status == 0
    assert [each["object"] for each in found["now"]] == ["Pod/train-1", "Pod/train-2", "Deployment/train"]
    assert "the scheduler has not placed the pod: 0/3 nodes are available" in found["now"][0]["reason"]
    hint = "Pod/train-1 stays pinned to M40, but a new pod would be pinned to L4. If you delete Pod/train-1, "
    assert found["hints"] == [f"{hint}its workload creates a new pod"] * hinted


def test_a_single_rejection_is_shown_as_once(cluster: Cluster) -> None:
    deployment(cluster)
    store(cluster, event(1, DENIED + OVER, name="train-abc", count=1))
    assert f"ReplicaSet/train-abc, once: {OVER}\n" in run("-n", "team-a", "why", "deployment/train").stdout


@cases("count, shown, more", three=(3, 3, ""), four=(4, 3, "  and 1 more pending\n"))
def test_pending_pods_beyond_three_are_counted(cluster: Cluster, count: int, shown: int, more: str) -> None:
    deployment(cluster)
    owners = [{"uid": "uid-train-abc", "kind": "ReplicaSet", "name": "x", "apiVersion": "apps/v1"}]
    for number in range(count):
        metadata = {"name": f"train-{number}", "namespace": "team-a", "ownerReferences": owners}
        stored = {"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending"}}
        cluster.store(f"/api/v1{TEAM}/pods/train-{number}", stored)
    _, found = why("deployment/train")
    assert sum(each["object"].startswith("Pod/") for each in found["now"]) == shown
    assert found["pending_left_out"] == count - shown
    printed = run("-n", "team-a", "why", "deployment/train").stdout
    assert printed.count(more or "more pending") == bool(more)


def test_the_event_of_a_pods_claim_is_shown_for_the_pod_and_its_workload(cluster: Cluster) -> None:
    pod(cluster, phase="Pending")
    rejected = event(1, DENIED + OVER, name="train-0", reason="FailedResourceClaimCreation")
    rejected["involvedObject"]["kind"] = "Pod"
    store(cluster, rejected)
    assert len(why("pod/train-0")[1]["rejected"]) == 1
    deployment(cluster)
    assert len(why("deployment/train")[1]["rejected"]) == 1


@pytest.mark.usefixtures("cluster")
def test_a_pod_that_was_rejected_is_not_stored() -> None:
    done = run("-n", "team-a", "why", "pod/train-7")
    hint = "Pod/train-7 does not exist in namespace team-a. A rejected pod is not stored, so name the workload"
    assert (done.exit_code, hint in done.stderr) == (1, True)


@pytest.mark.parametrize("named", ["train", "service/train", "pod/", "/train", ""])
@pytest.mark.usefixtures("cluster")
def test_an_argument_that_names_no_workload_is_bad_input(named: str) -> None:
    done = run("-n", "team-a", "why", named)
    assert (done.exit_code, "must be KIND/NAME, for example job/train; got " in done.stderr) == (2, True)


def test_kinds_are_named_as_kubectl_names_them() -> None:
    assert {parse_object(f"{name}/x")[0].kind for name in ("deploy", "Deployment", "deployments")} == {"Deployment"}
    assert {parse_object(f"{name}/x")[0].kind for name in ("cj", "cronjob")} == {"CronJob"}
