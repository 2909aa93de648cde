"""Tests of tenants' requests that the ValidatingAdmissionPolicies of the base reject, evaluated in Python.

tests/e2e/manifests/test_policies.py tests the policies on an API server, with the rights of real accounts.
"""

from collections.abc import Collection

import pytest

from tests.policies import ANNOTATIONS, KINDS, LABELS, POD, admits, policies
from tests.rendered import BASE, Json, rendered
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS as LONGEST
from vcuda.requests.bypasses import COMPUTE_POLICY
from vcuda.requests.runtime_devices import DEVICE_ANNOTATIONS

pytestmark = pytest.mark.slow

MAY_BIND, MAY_PATCH_NODES = "create pods/binding in team-a", "patch nodes"


def test_every_policy_is_in_force_and_fails_closed() -> None:
    found = policies()
    bindings = [each for each in rendered(BASE) if each["kind"] == KINDS[1]]
    assert {each["spec"]["policyName"] for each in bindings} == set(found)
    assert all(each["spec"]["validationActions"] == ["Deny"] for each in bindings)
    assert {spec["failurePolicy"] for spec in found.values()} == {"Fail"}


# Tests of the policy that protects allocation annotations and labels of pods


def pod(annotations: Json | None = None, labels: Json | None = None) -> Json:
    return {"metadata": {"name": "train", "annotations": annotations or {}, "labels": labels or {}}}


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
    for new, old, right in ((many, pod(), MAY_BIND), (pod(), many, MAY_PATCH_NODES)):
        assert not change_allocation(new, old)
        assert change_allocation(new, old, [right])
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


# Tests of the policy that protects the finalizer, the owner and an annotation of ResourceClaims

PROTECTED = {"finalizers": ["resource.kubernetes.io/delete-protection", "example.com/other"]}
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


# Tests of the policy that restricts deletions and evictions with a grace period of 0

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
