"""Tests of the requests of our own accounts that the ValidatingAdmissionPolicies of the base reject.

These are requests for Secrets, ConfigMaps and ledgers, and patches. The policy of the quota ConfigMap is tested here
too. tests/e2e/manifests/test_own_policies.py tests the policies on an API server, with the rights of real accounts.
"""

import itertools

import pytest

from controller.retry.retrier import RETRY_ANNOTATION
from tests.builders import MODEL
from tests.policies import ANNOTATIONS, LABELS, POD, Evaluation, admits, policies
from tests.rendered import Json
from vcuda.kube import team_ledger_name
from vcuda.placement.device_plugins import DISCOVERED
from vcuda.requests.schemes import ALLOCATION_ANNOTATIONS, SCHEMES

pytestmark = pytest.mark.slow

CERTS, EXTENDER_CERTS, SCHEDULER_CERTS, WEBHOOK, CONTROLLER = (
    f"system:serviceaccount:vcuda-quota:vcuda-{name}"
    for name in ("certs", "extender-certs", "scheduler-certs", "webhook", "controller")
)
PATCHES = "controller-patches.quota.vcuda.io"
LEDGERS, NAME = "vcuda-quota-ledgers", "kubernetes.io/metadata.name"


@pytest.mark.parametrize(
    ("user", "name", "kind", "admitted"),
    [
        (CERTS, "vcuda-webhook-ca", "Opaque", True),
        (CERTS, "vcuda-webhook-tls", "kubernetes.io/tls", True),
        (CERTS, "vcuda-webhook-ca", "kubernetes.io/service-account-token", False),
        (CERTS, "vcuda-webhook-tls", "Opaque", False),
        (CERTS, "vcuda-extender-ca", "Opaque", False),
        (CERTS, "another", "Opaque", False),
        (EXTENDER_CERTS, "vcuda-extender-ca", "Opaque", True),
        (EXTENDER_CERTS, "vcuda-extender-tls", "kubernetes.io/tls", True),
        (EXTENDER_CERTS, "vcuda-webhook-tls", "kubernetes.io/tls", False),
        (SCHEDULER_CERTS, "vcuda-scheduler-ca", "Opaque", True),
        (SCHEDULER_CERTS, "vcuda-extender-ca", "Opaque", False),
        ("admin", "another", "kubernetes.io/service-account-token", True),
    ],
)
def test_a_rotation_creates_its_own_two_secrets(user: str, name: str, kind: str, *, admitted: bool) -> None:
    secret = {"metadata": {"name": name}, "type": kind}
    assert admits("certificate-secrets.quota.vcuda.io", secret, None, userInfo={"username": user}) == admitted


@pytest.mark.parametrize("gone", [False, True], ids=["written", "deleted"])
@pytest.mark.parametrize(
    ("user", "namespace", "name", "admitted"),
    [
        (WEBHOOK, "vcuda-quota-ledgers", "gpu-ledger-team-a", True),
        (WEBHOOK, "vcuda-quota-ledgers", "kube-root-ca.crt", False),
        (WEBHOOK, "vcuda-quota", "gpu-placements", False),
        (WEBHOOK, "team-a", "gpu-quota-usage", False),
        (CONTROLLER, "vcuda-quota-ledgers", "gpu-ledger-team-a", True),
        (CONTROLLER, "vcuda-quota", "gpu-ledger-team-a", False),
        (CONTROLLER, "vcuda-quota", "gpu-placements", True),
        (CONTROLLER, "vcuda-quota", "vcuda-scheduler-config-1", False),
        (CONTROLLER, "vcuda-quota", "kube-root-ca.crt", False),
        (CONTROLLER, "team-a", "gpu-quota-usage", True),
        (CONTROLLER, "team-a", "gpu-quota-probe", True),
        (CONTROLLER, "team-a", "gpu-ledger-team-a", False),
        (CONTROLLER, "kube-system", "gpuquota", False),
        ("admin", "vcuda-quota", "kube-root-ca.crt", True),
    ],
)
def test_each_account_writes_only_its_own_config_maps(
    user: str, namespace: str, name: str, *, admitted: bool, gone: bool
) -> None:
    found: Json = {"metadata": {"name": name}}
    states = (None, found) if gone else (found, None)
    about = {"username": user}
    [other, ledgers] = [policies()[f"{name}.quota.vcuda.io"] for name in ("own-config-maps", "ledgers")]
    among, beside = (each["matchConstraints"]["namespaceSelector"] for each in (ledgers, other))
    assert among == {"matchLabels": {NAME: LEDGERS}}
    assert beside == {"matchExpressions": [{"key": NAME, "operator": "NotIn", "values": [LEDGERS]}]}
    policy = "ledgers.quota.vcuda.io" if namespace == LEDGERS else "own-config-maps.quota.vcuda.io"
    assert admits(policy, *states, userInfo=about, namespace=namespace) == admitted


def test_no_policy_applies_to_pod_creations_and_ledger_writes_meet_one_condition() -> None:
    """Pod creations and ledger writes are frequent. One more policy or condition would make them 5 % more expensive."""
    for name, spec in policies().items():
        for rule in spec["matchConstraints"]["resourceRules"]:
            assert not {"pods", "*"} & {*rule["resources"]} or "CREATE" not in rule["operations"], name
    for user, about in itertools.product((WEBHOOK, CONTROLLER), ((LEDGER, None), (LEDGER, LEDGER), (None, LEDGER))):
        asked = Evaluation(*about, userInfo={"username": user})
        assert not asked.meets_conditions(policies()["ledgers.quota.vcuda.io"])


KUBE_SYSTEM = "system:serviceaccount:kube-system:"
NAMESPACES, GARBAGE = f"{KUBE_SYSTEM}namespace-controller", f"{KUBE_SYSTEM}generic-garbage-collector"
LEDGER = {"metadata": {"name": "gpu-ledger-team-a", "finalizers": ["quota.vcuda.io/ledger"]}}
TEAM = {"metadata": {"name": team_ledger_name("vision")}}
MARK, LET_GO = ({"metadata": {"name": name}} for name in ("gpu-ledger-opened.1-2", "gpu-ledger-team-a"))


@pytest.mark.parametrize(
    ("user", "found", "old", "admitted"),
    [
        *((user, *states, True) for user in (WEBHOOK, CONTROLLER) for states in ((LEDGER, None), (None, MARK))),
        ("admin", LEDGER, None, False),
        ("admin", LEDGER, LEDGER, False),
        ("admin", LET_GO, LEDGER, False),
        ("admin", None, LEDGER, True),
        ("admin", None, LET_GO, False),
        ("admin", None, MARK, False),
        ("admin", None, TEAM, True),
        ("admin", TEAM, None, False),
        ("admin", TEAM, TEAM, False),
        *((user, None, stored, True) for user in (NAMESPACES, GARBAGE) for stored in (LEDGER, LET_GO, MARK)),
        (GARBAGE, MARK, None, False),
        ("admin", {"metadata": {"name": "kube-root-ca.crt"}}, None, True),
    ],
)
def test_only_our_accounts_write_ledgers_and_others_may_only_request_their_deletion(
    user: str, found: Json | None, old: Json | None, *, admitted: bool
) -> None:
    assert admits("ledgers.quota.vcuda.io", found, old, userInfo={"username": user}) == admitted


def quota(document: str | None, **fields: object) -> Json:
    return {"metadata": {"name": "gpuquota"}, "data": {} if document is None else {"gpu_quota": document}, **fields}


TERMINATING = {"metadata": {"name": "kube-system", "deletionTimestamp": "2026-12-01T00:00:00Z"}}
LIMITING = "team-a: {quota: {A100: 8}}"


@pytest.mark.parametrize(
    ("found", "old", "fields", "admitted"),
    [
        *(
            (None, quota(document), {}, False)
            for document in (LIMITING, "", "{}\n'*': {quota: {}}", "{'*': {}}", "# {}", None)
        ),
        (None, {"metadata": {"name": "gpuquota"}}, {}, False),
        *((None, quota(document), {}, True) for document in ("{}", " {}\n", "{ }\n\n")),
        (None, quota(LIMITING), {"space": TERMINATING}, True),
        (None, quota(LIMITING), {"namespace": "team-a"}, True),
        (None, {**quota(LIMITING), "metadata": {"name": "other"}}, {}, True),
        (quota(LIMITING), None, {}, True),
        (quota(LIMITING, immutable=False), quota("{}"), {}, True),
        (quota(LIMITING, immutable=True), None, {}, False),
        (quota(LIMITING, immutable=True), quota(LIMITING), {}, False),
    ],
)
def test_a_quota_that_limits_namespaces_is_deleted_only_with_its_namespace(
    found: Json | None, old: Json | None, fields: Json, *, admitted: bool
) -> None:
    about = {"namespace": "kube-system", "space": {"metadata": {"name": "kube-system"}}, **fields}
    assert admits("quota-config-map.quota.vcuda.io", found, old, **about) == admitted


ENFORCED = {"quota.vcuda.io/enforced": "true"}
SECURE = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.mark.parametrize(
    ("resource", "labels", "spec", "admitted"),
    [
        ("namespaces", {**SECURE, **ENFORCED}, {}, True),
        ("namespaces", {}, {}, False),
        ("namespaces", {"pod-security.kubernetes.io/enforce": "privileged"}, {}, False),
        ("namespaces", {**SECURE, "new": "1"}, {}, False),
        ("pods", {**SECURE, "nvidia.com/assigned-phase": "succeed"}, {}, False),
        ("pods", {**SECURE, **ENFORCED}, {}, False),
        ("pods", SECURE, {"containers": []}, False),
        ("nodes", {**SECURE, MODEL: "A100"}, {}, True),
        ("nodes", {**SECURE, "node-role.kubernetes.io/control-plane": ""}, {}, False),
        ("nodes", {}, {}, False),
        ("nodes", SECURE, {"taints": []}, False),
        ("pods", {**SECURE, MODEL: "A100"}, {}, False),
        ("replicasets", SECURE, {}, True),
        ("replicasets", SECURE, {"replicas": 0}, False),
    ],
)
def test_the_controller_may_change_its_own_labels_and_no_spec(
    resource: str, labels: Json, spec: Json, *, admitted: bool
) -> None:
    new, old = ({"metadata": {"labels": marks}, "spec": each} for marks, each in ((labels, spec), (SECURE, {})))
    for user, expected in ((CONTROLLER, admitted), ("admin", True)):
        request = {"userInfo": {"username": user}, "resource": {"resource": resource}}
        assert admits(PATCHES, new, old, (), **request) == expected


ALLOCATED = {name: "1" for name in ANNOTATIONS if ALLOCATION_ANNOTATIONS.fullmatch(name)}
KEPT: Json = {"annotations": {"a/b": "1"}, "labels": {"app": "train"}, "finalizers": ["a/b"], "ownerReferences": [POD]}
RETRIED = {"annotations": {"a/b": "1", RETRY_ANNOTATION: "now"}}


@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        ({}, {"pods", "replicasets", "jobs", "namespaces", "nodes"}),
        (RETRIED, {"pods", "replicasets", "jobs"}),
        ({"annotations": {"a/b": "2"}}, set()),
        ({"annotations": {}}, set()),
        ({"annotations": {"a/b": "1", "note": "x"}}, set()),
        ({"annotations": {"a/b": "1", **ALLOCATED}}, set()),
        ({"labels": {}}, set()),
        ({"labels": {"app": "train", "hami.io/vgpu-node": "gpu-1"}}, set()),
        ({"finalizers": []}, set()),
        ({"finalizers": ["a/b", "c/d"]}, set()),
        ({"ownerReferences": []}, set()),
        ({"ownerReferences": [POD, {**POD, "uid": "u2", "controller": False}]}, set()),
    ],
)
def test_the_controller_changes_no_foreign_metadata_of_any_kind(changed: Json, kinds: set[str]) -> None:
    """The garbage collector deletes an object whose owner does not exist, so the controller must set no owner."""
    new, old = ({"metadata": metadata, "spec": {}} for metadata in ({**KEPT, **changed}, KEPT))
    every = ("pods", "replicasets", "jobs", "namespaces", "nodes")
    given = [{"userInfo": {"username": CONTROLLER}, "resource": {"resource": each}} for each in every]
    found = {each["resource"]["resource"] for each in given if admits(PATCHES, new, old, (), **each)}
    assert found == kinds


@pytest.mark.parametrize("part", ["annotations", "labels"])
def test_the_controller_may_remove_every_allocation_annotation_and_label_of_a_pod_and_change_none(part: str) -> None:
    marks = {"annotations": [*ALLOCATED, "tencent.com/predicate-gpu-idx-0"], "labels": LABELS}[part]
    for resource in ("pods", "replicasets"):
        request = {"userInfo": {"username": CONTROLLER}, "resource": {"resource": resource}}
        for mark in marks:
            stored, changed = ({"metadata": {**KEPT, part: {**KEPT[part], mark: value}}, "spec": {}} for value in "12")
            assert admits(PATCHES, {"metadata": KEPT, "spec": {}}, stored, (), **request) == (resource == "pods")
            assert not admits(PATCHES, changed, stored, (), **request)


OWNER = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "gpu", "uid": "u1"}
OF_A_NODE = {"annotations": {"a/b": "1"}, "finalizers": ["karpenter.sh/termination"], "ownerReferences": [OWNER]}
OWN_ANNOTATIONS = [DISCOVERED, *(scheme.node_lock for scheme in SCHEMES if scheme.node_lock)]


@pytest.mark.parametrize(
    ("changed", "admitted"),
    [
        *(({"annotations": {"a/b": "1", name: "x"}}, True) for name in OWN_ANNOTATIONS),
        ({"annotations": {"a/b": "2"}}, False),
        ({"annotations": {}}, False),
        ({"annotations": {"a/b": "1", "hami.io/node-nvidia-register": "[]"}}, False),
        ({"finalizers": []}, False),
        ({"ownerReferences": []}, False),
        ({"labels": {MODEL: "A100"}, "annotations": {"a/b": "1", DISCOVERED: "A100 from hami"}}, True),
    ],
)
def test_the_controller_may_change_only_model_record_and_locks_of_a_node(changed: Json, *, admitted: bool) -> None:
    request = {"userInfo": {"username": CONTROLLER}, "resource": {"resource": "nodes"}}
    new, old = {"metadata": {**OF_A_NODE, **changed}, "spec": {}}, {"metadata": OF_A_NODE, "spec": {}}
    policy = PATCHES
    assert admits(policy, new, old, (), **request) == admitted
    assert admits(policy, new, old, (), **request | {"userInfo": {"username": "admin"}})
    for each in (DISCOVERED, *OWN_ANNOTATIONS):
        marked = {"metadata": {**OF_A_NODE, "annotations": {"a/b": "1", each: "x"}}, "spec": {}}
        assert admits(policy, old, marked, (), **request), "the removal is permitted too"
