"""The requests that the ValidatingAdmissionPolicies of the base reject, evaluated by a CEL implementation in Python.

tests/e2e/manifests/test_policies.py tests the policies on an API server, with the rights of real accounts.
"""

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import celpy
import pytest
from celpy import celtypes
from celpy.adapter import json_to_cel

from controller.retry.retrier import RETRY_ANNOTATION
from tests.builders import MODEL
from tests.guarded import GUARDED_ANNOTATIONS
from tests.rendered import BASE, Json, rendered
from vcuda.discovery.sources import DISCOVERED
from vcuda.quota.terms import MAX_TERMINATING_SECONDS as LONGEST
from vcuda.requests.refusals import COMPUTE_POLICY, KAI
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS
from vcuda.requests.schemes import ALLOCATION_ANNOTATIONS, SCHEMES

KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
CERTS, EXTENDER_CERTS, SCHEDULER_CERTS, WEBHOOK, CONTROLLER = (
    f"system:serviceaccount:vcuda-quota:vcuda-{name}"
    for name in ("certs", "extender-certs", "scheduler-certs", "webhook", "controller")
)
PATCHES = "controller-patches.quota.vcuda.io"
LEDGERS, NAME = "vcuda-quota-ledgers", "kubernetes.io/metadata.name"
MAY_BIND, MAY_PATCH_NODES = "create pods/binding in team-a", "patch nodes"


Function = Callable[..., celtypes.Value]
ENVIRONMENT = celpy.Environment()


@functools.cache
def compiled(expression: str) -> Any:
    return ENVIRONMENT.compile(expression)


@functools.cache
def policies() -> dict[str, Json]:
    return {each["metadata"]["name"]: each["spec"] for each in rendered(BASE) if each["kind"] == KINDS[0]}


def asking(rights: Collection[str]) -> dict[str, Any]:
    """Replace CEL's `authorizer`: its calls build a text such as ``patch nodes``, and look it up in the rights."""

    def add(before: str) -> Function:
        return lambda asked, name: celtypes.StringType(f"{asked}{before}{name}" if name else asked)

    def check(asked: celtypes.StringType, verb: celtypes.StringType) -> celtypes.Value:
        return celtypes.StringType(f"{verb} {asked}")

    return {
        "group": add(""),
        "resource": add(""),
        "subresource": add("/"),
        "namespace": add(" in "),
        "check": check,
        "allowed": lambda asked: celtypes.BoolType(str(asked) in rights),
    }


class Evaluation:
    """Evaluates the CEL expressions of a policy for one request. Raises CELEvalError if an evaluation fails."""

    def __init__(
        self,
        found: Json | None,
        old: Json | None,
        rights: Collection[str] = (),
        *,
        space: Json | None = None,
        **request: object,
    ) -> None:
        operation = "DELETE" if found is None else "UPDATE" if old else "CREATE"
        request = {"operation": operation, **request}
        given = {"object": found, "oldObject": old, "request": request, "authorizer": "", "namespaceObject": space}
        self.known = {key: json_to_cel(value) for key, value in given.items()}
        self.variables = self.known["variables"] = celtypes.MapType()
        self.functions = asking(rights)

    def evaluate(self, expression: str) -> celtypes.Value:
        return ENVIRONMENT.program(compiled(expression), functions=self.functions).evaluate(self.known)

    def meets_conditions(self, spec: Json) -> bool:
        return all(self.evaluate(each["expression"]) for each in spec.get("matchConditions", []))


def admits(name: str, found: Json | None, old: Json | None, rights: Collection[str] = (), **given: Any) -> bool:
    spec, asked = policies()[name], Evaluation(found, old, rights, **given)
    if not asked.meets_conditions(spec):
        return True
    for each in spec.get("variables", []):
        asked.variables[celtypes.StringType(each["name"])] = asked.evaluate(each["expression"])
    return all(asked.evaluate(each["expression"]) for each in spec["validations"])


def test_every_policy_is_in_force_and_fails_closed() -> None:
    found = policies()
    bindings = [each for each in rendered(BASE) if each["kind"] == KINDS[1]]
    assert {each["spec"]["policyName"] for each in bindings} == set(found)
    assert all(each["spec"]["validationActions"] == ["Deny"] for each in bindings)
    assert {spec["failurePolicy"] for spec in found.values()} == {"Fail"}


# The policy that protects allocation annotations and labels of pods


def pod(annotations: Json | None = None, labels: Json | None = None) -> Json:
    return {"metadata": {"name": "train", "annotations": annotations or {}, "labels": labels or {}}}


ANNOTATIONS = sorted(
    GUARDED_ANNOTATIONS
    | {*KAI, "GPU-Fraction", "Gpu-Memory", f"nvidia.com{COMPUTE_POLICY}", f"acme.com{COMPUTE_POLICY}"}
)
LABELS = sorted({name for scheme in SCHEMES for name in scheme.allocation_labels})
CHANGES = [
    *(pytest.param(pod({name + "0" * name.endswith("-"): "1"}), id=name) for name in ANNOTATIONS),
    *(pytest.param(pod(labels={name: "1"}), id=f"label {name}") for name in LABELS),
]


def change_allocation(new: Json, old: Json | None, rights: Collection[str] = ()) -> bool:
    return admits("allocations.quota.vcuda.io", new, old, rights, namespace="team-a")


@pytest.mark.parametrize("allocated", CHANGES)
def test_only_an_account_that_may_bind_or_patch_nodes_changes_an_allocation_of_any_scheme(allocated: Json) -> None:
    bare, note = {"metadata": {"name": "train"}}, pod({"note": "1"}, {"app": "a"})
    [(part, marks)] = [(key, marks) for key, marks in allocated["metadata"].items() if marks and key != "name"]
    other = {"metadata": {part: dict.fromkeys(marks, "2")}}
    for new, old in ((allocated, bare), (allocated, note), (bare, allocated), (other, allocated), (allocated, None)):
        assert not change_allocation(new, old)
        assert not change_allocation(new, old, ["create pods/binding in team-b", "update nodes"])
        assert change_allocation(new, old, [MAY_BIND])
        assert change_allocation(new, old, [MAY_PATCH_NODES])
    assert change_allocation(allocated, allocated)


@pytest.mark.parametrize(
    "old", [None, {"metadata": {}}, pod({"note": "1"}, {"app": "a"})], ids=["none", "bare", "other"]
)
def test_any_user_may_change_other_annotations(old: Json | None) -> None:
    assert change_allocation(pod({"note": "2", "nvidia.com/gpu.product": "M40"}, {"app": "b"}), old)
    assert change_allocation({"metadata": {}}, old)


def test_only_an_account_that_may_bind_or_patch_nodes_changes_more_than_a_thousand_annotations() -> None:
    many = pod({f"a{number}": "" for number in range(1001)})
    for new, old in ((many, pod()), (pod(), many)):
        assert not change_allocation(new, old)
        assert change_allocation(new, old, [MAY_BIND])
        assert change_allocation(new, old, [MAY_PATCH_NODES])
    assert change_allocation(many, many)


@pytest.mark.parametrize("key", [key + rest for key in DEVICE_ANNOTATIONS for rest in ("", "/pod", "/container.a")])
def test_only_an_account_that_may_bind_or_patch_nodes_adds_an_annotation_that_gives_devices(key: str) -> None:
    bare, given, other = pod(), pod({key: "nvidia.com/gpu=all"}), pod({key: "nvidia.com/gpu=0"})
    for new, old in ((given, bare), (given, other), (given, None)):
        assert not change_allocation(new, old)
        assert change_allocation(new, old, [MAY_BIND])
        assert change_allocation(new, old, [MAY_PATCH_NODES])
    assert change_allocation(bare, given)
    assert change_allocation(given, given)


@pytest.mark.parametrize(
    ("new", "old", "anybody"),
    [
        (["orphan"], None, False),
        (["example.com/other", "orphan"], ["example.com/other"], False),
        (["orphan"], ["orphan"], True),
        (None, ["orphan"], True),
        (["example.com/orphan"], None, True),
    ],
)
def test_only_an_account_that_deletes_pods_everywhere_adds_the_finalizer_that_orphans_claims(
    new: list[str] | None, old: list[str] | None, *, anybody: bool
) -> None:
    found, before = ({"metadata": {"name": "train", **({"finalizers": each} if each else {})}} for each in (new, old))
    assert change_allocation(found, before, [MAY_BIND, MAY_PATCH_NODES, "delete pods in team-a"]) == anybody
    assert change_allocation(found, before, ["delete pods"])


# The policy that protects the finalizer, the owner and an annotation of ResourceClaims

PROTECTED = {"finalizers": ["resource.kubernetes.io/delete-protection", "example.com/other"]}
POD = {"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "u1", "controller": True}
GROUP = {**POD, "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup"}
OWNED = {"ownerReferences": [POD]}
UNLIMITED = {"annotations": {f"manager.nvidia.com{COMPUTE_POLICY}": "none"}}
MANY = {"annotations": {f"a{number}": "" for number in range(1001)}}
A_CLAIM = {"resource": "resourceclaims"}
MAY_ALLOCATE = "update resource.k8s.ioresourceclaims/status in team-a"


@pytest.mark.parametrize(
    ("old", "new", "anybody"),
    [
        (PROTECTED, PROTECTED, True),
        (PROTECTED, {"finalizers": PROTECTED["finalizers"][:1]}, True),
        (PROTECTED, {"finalizers": PROTECTED["finalizers"][1:]}, False),
        (PROTECTED, {}, False),
        ({}, PROTECTED, True),
        (OWNED, OWNED, True),
        (OWNED, {"ownerReferences": [POD, {**POD, "kind": "ConfigMap", "uid": "u2", "controller": False}]}, False),
        (OWNED, {"ownerReferences": [{**POD, "apiVersion": "v2"}]}, False),
        (OWNED, {"ownerReferences": [{**POD, "name": "other"}]}, False),
        (OWNED, {}, False),
        (OWNED, {"ownerReferences": [{**POD, "uid": "u2"}]}, False),
        (OWNED, {"ownerReferences": [{**POD, "controller": False}]}, False),
        (OWNED, {"ownerReferences": [{**POD, "kind": "ConfigMap"}]}, False),
        ({"ownerReferences": [GROUP]}, {"ownerReferences": [GROUP]}, True),
        ({"ownerReferences": [GROUP]}, {}, False),
        ({"ownerReferences": [{**POD, "controller": False}]}, {}, True),
        ({"ownerReferences": [{**POD, "uid": f"u{number}", "controller": False} for number in range(101)]}, {}, False),
        ({"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "u1"}]}, {}, True),
        ({"ownerReferences": [{**POD, "apiVersion": "hami.io/v1", "kind": "Other"}]}, {}, False),
        ({}, OWNED, True),
        ({}, UNLIMITED, False),
        (UNLIMITED, {"annotations": {**UNLIMITED["annotations"], "note": "1"}}, True),
        ({"annotations": {"manager.nvidia.com/vgpu-compute-policy": "fixed"}}, UNLIMITED, False),
        (UNLIMITED, {}, True),
        ({}, MANY, False),
        (MANY, {**MANY, **PROTECTED}, True),
        ({}, {"annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"}}, True),
    ],
)
def test_only_an_account_that_may_write_claim_status_changes_finalizer_owners_or_limit(
    old: Json, new: Json, *, anybody: bool
) -> None:
    def change(*rights: str) -> bool:
        found, before = ({"metadata": {"name": "gpu", **metadata}} for metadata in (new, old))
        return admits("claims.quota.vcuda.io", found, before, rights, namespace="team-a", resource=A_CLAIM)

    assert (change(), change("update resource.k8s.ioresourceclaims in team-a")) == (anybody, anybody)
    assert change(MAY_ALLOCATE)


OF_GROUP = {"finalizers": ["scheduling.k8s.io/podgroup-protection", "example.com/other"]}


@pytest.mark.parametrize(
    ("old", "new", "anybody"),
    [
        (OF_GROUP, OF_GROUP, True),
        (OF_GROUP, {"finalizers": OF_GROUP["finalizers"][:1]}, True),
        (OF_GROUP, {"finalizers": OF_GROUP["finalizers"][1:]}, False),
        (OF_GROUP, {}, False),
        ({}, OF_GROUP, True),
        (OWNED, {}, True),
    ],
)
def test_only_an_account_that_updates_pod_groups_everywhere_removes_their_finalizer(
    old: Json, new: Json, *, anybody: bool
) -> None:
    def change(*rights: str) -> bool:
        found, before = ({"metadata": {"name": "group", **metadata}} for metadata in (new, old))
        resource = {"resource": "podgroups"}
        return admits("claims.quota.vcuda.io", found, before, rights, namespace="team-a", resource=resource)

    assert (change(), change("update scheduling.k8s.iopodgroups in team-a")) == (anybody, anybody)
    assert change("update scheduling.k8s.iopodgroups")


# The policy that restricts deletions and evictions with a grace period of 0

USED_BY_NAME: Json = {"resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}
MADE_FOR_THE_POD: Json = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}]}
GROUPED: Json = {"schedulingGroup": {"podGroupName": "group"}}
OF_SCHEDULER: Json = {"extendedResourceClaimStatus": {"resourceClaimName": "train-extended-resources-x"}}
ORPHANING: Json = {"name": "train", "finalizers": ["example.com/other", "orphan"]}
ORPHAN, BACKGROUND = {"propagationPolicy": "Orphan"}, {"propagationPolicy": "Background", "orphanDependents": False}
NOW, SOON = {"gracePeriodSeconds": 0}, {"gracePeriodSeconds": 1}
RUNNING, ENDED = {"phase": "Running"}, {"phase": "Failed"}


def running(spec: Json, status: Json) -> Json:
    return {"metadata": {"name": "train"}, "spec": {"nodeName": "gpu-1", **spec}, "status": status}


@pytest.mark.parametrize(
    ("old", "options", "anybody"),
    [
        pytest.param(running(USED_BY_NAME, RUNNING), NOW, False, id="its containers may run"),
        pytest.param(running(USED_BY_NAME, {}), NOW, False, id="kubelet has not written a status yet"),
        pytest.param(running(MADE_FOR_THE_POD, RUNNING), NOW, False, id="its claim may have a second owner"),
        pytest.param(running({**MADE_FOR_THE_POD, **GROUPED}, RUNNING), NOW, False, id="the claim is its group's"),
        pytest.param(running(GROUPED, RUNNING), NOW, True, id="its group has no claim for it"),
        pytest.param(running(MADE_FOR_THE_POD, RUNNING), ORPHAN, False, id="the claim would stay"),
        pytest.param(
            running({**MADE_FOR_THE_POD, "terminationGracePeriodSeconds": 0}, RUNNING), ORPHAN, False, id="so it would"
        ),
        pytest.param(running(MADE_FOR_THE_POD, RUNNING), {"orphanDependents": True}, False, id="by the older field"),
        pytest.param(running(MADE_FOR_THE_POD, ENDED), ORPHAN, True, id="it has ended, and the claim stays"),
        pytest.param(running({}, RUNNING), {**NOW, **ORPHAN}, True, id="there is no claim to stay"),
        *(
            pytest.param(running({}, {**RUNNING, **OF_SCHEDULER}), options, False, id=f"the scheduler's, by {options}")
            for options in (ORPHAN, {"orphanDependents": True}, {**SOON, **ORPHAN}, {**NOW, **ORPHAN})
        ),
        pytest.param(running({}, {**ENDED, **OF_SCHEDULER}), ORPHAN, False, id="nobody would be charged for the claim"),
        pytest.param(running({}, {**RUNNING, **OF_SCHEDULER}), NOW, False, id="it has a claim of the scheduler"),
        pytest.param(
            {**running(MADE_FOR_THE_POD, RUNNING), "metadata": ORPHANING}, {}, False, id="by the pod's finalizer"
        ),
        pytest.param(
            {**running({}, {**RUNNING, **OF_SCHEDULER}), "metadata": ORPHANING}, None, False, id="the scheduler's too"
        ),
        pytest.param({**running({}, RUNNING), "metadata": ORPHANING}, {}, True, id="the finalizer keeps no claim"),
        pytest.param(running(MADE_FOR_THE_POD, RUNNING), BACKGROUND, True, id="the claim goes in the background"),
        pytest.param(running(USED_BY_NAME, RUNNING), SOON, True, id="kubelet ends it first"),
        pytest.param(running(USED_BY_NAME, RUNNING), {}, True, id="deleted with its own grace period"),
        pytest.param(running(USED_BY_NAME, RUNNING), None, True, id="without options"),
        pytest.param(running(USED_BY_NAME, ENDED), NOW, True, id="it has ended"),
        pytest.param(running({**USED_BY_NAME, "nodeName": ""}, {}), NOW, True, id="it was never bound"),
        pytest.param(
            running({**USED_BY_NAME, "terminationGracePeriodSeconds": 0}, RUNNING), NOW, True, id="its own period is 0"
        ),
        pytest.param(
            {
                **running({**USED_BY_NAME, "terminationGracePeriodSeconds": 0}, RUNNING),
                "metadata": {"deletionGracePeriodSeconds": 600},
            },
            NOW,
            False,
            id="its own was 0, and an earlier deletion gave it longer",
        ),
        pytest.param(
            running({**USED_BY_NAME, "terminationGracePeriodSeconds": 9}, RUNNING), NOW, False, id="its own is not 0"
        ),
        pytest.param(running({}, RUNNING), NOW, True, id="it uses no claim"),
    ],
)
def test_only_an_account_that_deletes_pods_everywhere_force_deletes_a_pod_whose_claim_stays(
    old: Json, options: Json | None, *, anybody: bool
) -> None:
    def delete(*rights: str) -> bool:
        return admits("forced-deletions.quota.vcuda.io", None, old, rights, namespace="team-a", options=options)

    assert (delete(), delete("delete pods in team-a")) == (anybody, anybody)
    assert delete("delete pods")


@pytest.mark.parametrize(
    ("eviction", "anybody"),
    [
        ({"deleteOptions": NOW}, False),
        ({"deleteOptions": ORPHAN}, False),
        ({"deleteOptions": SOON}, True),
        ({"deleteOptions": {}}, True),
        ({}, True),
    ],
)
def test_only_an_account_that_deletes_pods_everywhere_evicts_by_force(eviction: Json, *, anybody: bool) -> None:
    found = {"metadata": {"name": "train"}, **eviction}
    assert admits("forced-deletions.quota.vcuda.io", found, None, namespace="team-a") == anybody
    assert admits("forced-deletions.quota.vcuda.io", found, None, ["delete pods"], namespace="team-a")


@pytest.mark.parametrize(
    ("seconds", "own", "anybody"),
    [
        (LONGEST, 9, True),
        (LONGEST + 1, 9, False),
        (9_000, None, False),
        (900, 900, True),
    ],
)
def test_only_an_account_that_deletes_pods_everywhere_lengthens_a_grace_period_beyond_the_charge(
    seconds: int, own: int | None, *, anybody: bool
) -> None:
    options = {"gracePeriodSeconds": seconds}
    old = running({} if own is None else {"terminationGracePeriodSeconds": own}, RUNNING)
    eviction = {"metadata": {"name": "train"}, "deleteOptions": options}

    def delete(*rights: str) -> bool:
        return admits("forced-deletions.quota.vcuda.io", None, old, rights, namespace="team-a", options=options)

    def evict(*rights: str) -> bool:
        return admits("forced-deletions.quota.vcuda.io", eviction, None, rights, namespace="team-a")

    assert (delete(), delete("delete pods")) == (anybody, True)
    assert (evict(), evict("delete pods")) == (seconds <= LONGEST, True)


# The policies that restrict the accounts of vcuda quota: Secrets, ConfigMaps, ledgers and patches


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
        (WEBHOOK, "vcuda-quota", "gpu-cards", False),
        (WEBHOOK, "team-a", "gpu-quota-usage", False),
        (CONTROLLER, "vcuda-quota-ledgers", "gpu-ledger-team-a", True),
        (CONTROLLER, "vcuda-quota", "gpu-ledger-team-a", False),
        (CONTROLLER, "vcuda-quota", "gpu-cards", True),
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
    """One more policy or condition would make each of these frequent requests about 5 % more expensive."""
    for name, spec in policies().items():
        for rule in spec["matchConstraints"]["resourceRules"]:
            assert not {"pods", "*"} & {*rule["resources"]} or "CREATE" not in rule["operations"], name
    for user, about in itertools.product((WEBHOOK, CONTROLLER), ((LEDGER, None), (LEDGER, LEDGER), (None, LEDGER))):
        asked = Evaluation(*about, userInfo={"username": user})
        assert not asked.meets_conditions(policies()["ledgers.quota.vcuda.io"])


KUBE_SYSTEM = "system:serviceaccount:kube-system:"
NAMESPACES, GARBAGE = f"{KUBE_SYSTEM}namespace-controller", f"{KUBE_SYSTEM}generic-garbage-collector"
LEDGER = {"metadata": {"name": "gpu-ledger-team-a", "finalizers": ["quota.vcuda.io/ledger"]}}
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
    """The garbage collector deletes an object whose owner does not exist."""
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
