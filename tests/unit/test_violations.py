"""Tests of the search for pods beyond their quota. It finds the newest pods, and only as many as needed."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, strategies as st

from controller.violations.violations import Violation, ViolationKind, find_violations
from tests.builders import LABELS, MODEL, nodes, vcuda_pod, view
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, fits, total

AT = nodes(**{"gpu-1": {MODEL: "P100"}})
FOUR = NamespaceQuota({"M40": Limit(400)})


def pod(name: str, cores: int = 100, age: int = 1, **fields: object) -> StoredPod:
    """Return a pod on M40 that is ``age`` hours old. It is charged ``cores``, and the memory of whole cards."""
    given = {"model": "M40", "node": "", "live": True, "charge": Charge(cores, 0, cores), **fields}
    created = f"2026-01-01T{23 - age:02}:00:00Z"
    return StoredPod(uid=f"uid-{name}", namespace="team-a", name=name, created=created, **given)  # type: ignore[arg-type]  # a test gives any fields


def found(*pods: StoredPod, quota: NamespaceQuota = FOUR, at: Nodes = AT) -> list[tuple[str, str]]:
    return [(finding.stored.name, finding.kind.value) for finding in find_violations("team-a", quota, pods, at)]


def over(*names: str) -> list[tuple[str, str]]:
    return [(name, "over-quota") for name in names]


FOUND: dict[str, tuple[list[StoredPod], list[tuple[str, str]]]] = {
    "none": ([], []),
    "exactly at the limit": ([pod("a", 200, 2), pod("b", 200, 1)], []),
    "the newest": ([pod("a", 200, 3), pod("b", 200, 2), pod("c", 100, 1)], over("c")),
    "in any order": ([pod("c", 300, 1), pod("b", 200, 2), pod("a", 200, 3)], over("c")),
    "the two newest": ([pod("a", 300, 3), pod("b", 200, 2), pod("c", 200, 1)], over("c", "b")),
    "an older, larger pod stays": ([pod("big", 400, 2), pod("small", 1, 1)], over("small")),
    "a newer pod that fits stays": ([pod("a", 300, 3), pod("b", 200, 2), pod("c", 100, 1)], over("b")),
    "alone beyond the limit": ([pod("big", 500, 2), pod("small", 100, 1)], over("big")),
    "a pod that has ended": ([pod("a", 400, 2), pod("b", 400, 1, live=False)], []),
    "the newest pod is terminating": ([pod("a", 400, 2), pod("b", 100, 1, terminating=True)], []),
    "an older pod is terminating": ([pod("a", 100, 2, terminating=True), pod("b", 400, 1)], []),
    "one of two pods is terminating": (
        [pod("a", 400, 3), pod("b", 100, 2), pod("c", 100, 1, terminating=True)],
        over("b"),
    ),
    "the model of its node is not allowed": (
        [pod("held", 300, 2), pod("runs", 200, 1, model=None, node="gpu-1")],
        [("runs", "not-allowed")],
    ),
    "the model it is pinned to is not allowed": ([pod("a", model="A100")], [("a", "not-allowed")]),
    "not allowed, and terminating": ([pod("a", model="A100", terminating=True)], []),
    "not pinned and on no node with a model": (
        [pod("a", 900, model=None), pod("b", model=None, node="gone", age=2), pod("c", 400)],
        [("a", "unpinned"), ("b", "unpinned")],
    ),
    "not pinned, ended": ([pod("a", model=None, terminating=True), pod("b", model=None, live=False)], []),
}


@pytest.mark.parametrize(("pods", "expected"), FOUND.values(), ids=FOUND)
def test_pods_that_the_quota_would_not_admit_are_found(pods: list[StoredPod], expected: list[tuple[str, str]]) -> None:
    assert found(*pods) == expected


def test_the_order_of_pods_of_one_second_is_stable() -> None:
    pods = [pod(name, 300) for name in ("b", "a", "c")]
    assert found(*pods) == found(*reversed(pods)) == over("c", "b")


SHARES = [pod("a", age=2, charge=Charge(50, 3000)), pod("b", charge=Charge(50, 1001))]


def one(*pods: StoredPod, quota: NamespaceQuota = FOUR) -> Violation:
    [finding] = find_violations("team-a", quota, pods, AT)
    return finding


MAY_NOT = "namespace team-a may not use GPU model"


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        pytest.param(
            one(pod("a", 300, 2), pod("b", 200, 1)),
            "beyond GPU quota: M40 in namespace team-a, used: 5 cards, limited: 4 cards; this pod takes 2 cards and"
            " does not fit with the older pods and claims",
            id="cores",
        ),
        pytest.param(
            one(*SHARES, quota=NamespaceQuota({"M40": Limit(400, 4000)})),
            "beyond GPU quota: memory of M40 in namespace team-a, used: 4001 MiB, limited: 4000 MiB; this pod takes"
            " 1001 MiB and does not fit with the older pods and claims",
            id="memory",
        ),
        *(
            (one(pod("a", model="P100"), quota=quota), f"{MAY_NOT} P100; the models that it may use: {allowed}")
            for quota, allowed in ((FOUR, "M40"), (NamespaceQuota({}), "none"))
        ),
        pytest.param(
            one(pod("a", model=None)),
            "the GPU quota of namespace team-a does not count this pod, because it has no GPU model",
            id="unpinned",
        ),
    ],
)
def test_a_violation_names_its_reason(finding: Violation, message: str) -> None:
    assert finding.message == message


@pytest.mark.parametrize("mode", Mode)
def test_only_a_quota_that_enforces_evicts_and_only_pods_that_it_counts(mode: Mode) -> None:
    quota = NamespaceQuota({"M40": Limit(0)}, mode=mode)
    pods = [pod("a"), pod("b", model="P100"), pod("c", model=None)]
    evictable = {finding.kind: finding.evictable for finding in find_violations("team-a", quota, pods, AT)}
    enforced = mode == Mode.ENFORCE
    assert evictable == {
        ViolationKind.OVER_QUOTA: enforced,
        ViolationKind.NOT_ALLOWED: enforced,
        ViolationKind.UNPINNED: False,
    }


def test_a_mirror_pod_is_reported_and_not_evicted() -> None:
    """An eviction would only delete the mirror pod. The static pod runs on, and the kubelet recreates its mirror."""
    finding = one(pod("static", 500, node="gpu-1", mirror=True))
    assert not finding.evictable
    assert finding.message.endswith(" To end this mirror pod, remove the manifest of its static pod from node gpu-1.")


def named(pods: Sequence[StoredPod]) -> list[StoredPod]:
    return [msgspec.structs.replace(each, name=f"p{at}", uid=f"uid-p{at}") for at, each in enumerate(pods)]


ONE_POD = st.builds(
    pod,
    st.just("a"),
    age=st.integers(0, 23),
    charge=st.builds(Charge, st.integers(0, 300), st.integers(0, 2000), st.integers(0, 300)),
    model=st.sampled_from(["M40", "P100", "A100", None]),
    node=st.sampled_from(["", "gpu-1"]),
    live=st.sampled_from([True, True, True, False]),
    terminating=st.sampled_from([False, False, True]),
)
PODS = st.lists(ONE_POD, max_size=8).map(named)
LIMITS = st.builds(Limit, st.sampled_from([0, 100, 400, 900]), st.sampled_from([None, 0, 1000, 5000]))
QUOTAS = st.dictionaries(st.sampled_from(["M40", "P100"]), LIMITS).map(NamespaceQuota)


def charged(finding: Violation) -> StoredPod:
    assert isinstance(finding.stored, StoredPod)
    return finding.stored


def charge_on(model: str, pods: Sequence[StoredPod]) -> Charge:
    return total(each.charge for each in pods if each.model_on(AT) == model)


@given(QUOTAS, PODS)
def test_the_remaining_pods_fit_and_with_any_found_one_they_do_not(
    quota: NamespaceQuota, pods: list[StoredPod]
) -> None:
    findings = [f for f in find_violations("team-a", quota, pods, AT) if f.kind != ViolationKind.UNPINNED]
    evicted = {finding.stored.uid for finding in findings}
    staying = [each for each in pods if each.live and not each.terminating]
    kept = [each for each in staying if each.uid not in evicted]
    for model in ("M40", "P100", "A100"):
        limit = quota.limits.get(model, Limit(0))
        used = charge_on(model, kept)
        assert fits(limit, Charge(), used)
        for gone in (charged(f) for f in findings if charged(f).model_on(AT) == model):
            older = [each for each in kept if (each.created, each.name) < (gone.created, gone.name)]
            assert not fits(limit, charge_on(model, older), gone.charge)
            assert not fits(limit, used, gone.charge)


@given(QUOTAS, PODS)
def test_no_other_pod_is_found_while_evicted_pods_terminate(quota: NamespaceQuota, pods: list[StoredPod]) -> None:
    found_now = find_violations("team-a", quota, pods, AT)
    gone = {finding.stored.uid for finding in found_now if finding.evictable}
    after = [msgspec.structs.replace(each, terminating=each.terminating or each.uid in gone) for each in pods]
    left = {finding.stored.uid for finding in find_violations("team-a", quota, after, AT)}
    assert left == {finding.stored.uid for finding in found_now} - gone


@pytest.mark.parametrize("deletion", [None, "2026-01-01T00:00:00Z"])
def test_a_pod_whose_deletion_was_accepted_is_terminating(deletion: str | None) -> None:
    stored = read_stored(view(vcuda_pod(metadata={"uid": "u", "deletionTimestamp": deletion})), LABELS)
    assert stored
    assert stored.terminating is bool(deletion)
