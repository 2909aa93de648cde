"""Which pods a quota would not let in: the newest, as few as suffice, and never one that it would keep."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.violations import Finding, Kind, audit
from tests.builders import LABELS, MODEL, nodes, vcuda_pod, view
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, fits, total

AT = nodes(**{"gpu-1": {MODEL: "P100"}})
FOUR = NamespaceQuota({"M40": Limit(400)})


def pod(name: str, cores: int = 100, age: int = 1, **fields: object) -> StoredPod:
    """Return one on M40, created ``age`` hours ago, with cores and a whole card's memory for each card."""
    given = {"model": "M40", "node": "", "live": True, "charge": Charge(cores, 0, cores), **fields}
    created = f"2026-01-01T{23 - age:02}:00:00Z"
    return StoredPod(uid=f"uid-{name}", namespace="team-a", name=name, created=created, **given)  # type: ignore[arg-type]  # the fields of a test


def found(*pods: StoredPod, quota: NamespaceQuota = FOUR, at: Nodes = AT) -> list[tuple[str, str]]:
    """Return the name of each pod that is found, and what is wrong with it."""
    return [(finding.pod.name, finding.kind.value) for finding in audit("team-a", quota, pods, at)]


def over(*names: str) -> list[tuple[str, str]]:
    return [(name, "over-quota") for name in names]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([pod("a", 200, 2), pod("b", 200, 1)], [], id="full, and within"),
        pytest.param([pod("a", 200, 3), pod("b", 200, 2), pod("c", 100, 1)], over("c"), id="the newest"),
        pytest.param([pod("c", 300, 1), pod("b", 200, 2), pod("a", 200, 3)], over("c"), id="in any order"),
        pytest.param([pod("a", 300, 3), pod("b", 200, 2), pod("c", 200, 1)], over("c", "b"), id="the two newest"),
        pytest.param([pod("big", 400, 2), pod("small", 1, 1)], over("small"), id="a bigger one that is older stays"),
        pytest.param(
            [pod("a", 300, 3), pod("b", 200, 2), pod("c", 100, 1)], over("b"), id="a newer one that fits stays"
        ),
        pytest.param([pod("big", 500, 2), pod("small", 100, 1)], over("big"), id="alone beyond the limit"),
        pytest.param([pod("a", 400, 2), pod("b", 400, 1, live=False)], [], id="a finished one counts for nothing"),
        pytest.param([pod("a", 400, 2), pod("b", 100, 1, terminating=True)], [], id="the newest goes already"),
        pytest.param([pod("a", 100, 2, terminating=True), pod("b", 400, 1)], [], id="an older one goes already"),
        pytest.param(
            [pod("a", 400, 3), pod("b", 100, 2), pod("c", 100, 1, terminating=True)], over("b"), id="one goes of two"
        ),
        pytest.param(
            [pod("held", 300, 2), pod("runs", 200, 1, model=None, node="gpu-1")],
            [("runs", "not-allowed")],
            id="the model of its node is not allowed",
        ),
        pytest.param([pod("a", model="A100")], [("a", "not-allowed")], id="the model it is held to is not allowed"),
        pytest.param([pod("a", model="A100", terminating=True)], [], id="not allowed, and goes already"),
        pytest.param(
            [pod("a", 900, model=None), pod("b", model=None, node="gone", age=2), pod("c", 400)],
            [("a", "unpinned"), ("b", "unpinned")],
            id="held to none and on none that is known",
        ),
        pytest.param([pod("a", model=None, terminating=True), pod("b", model=None, live=False)], [], id="none, ended"),
    ],
)
def test_what_is_found(pods: list[StoredPod], expected: list[tuple[str, str]]) -> None:
    assert found(*pods) == expected


def test_of_one_second_the_order_is_the_same_each_time() -> None:
    pods = [pod(name, 300) for name in ("b", "a", "c")]
    assert found(*pods) == found(*reversed(pods)) == over("c", "b")


@pytest.mark.parametrize(
    ("limit", "pods", "expected"),
    [
        pytest.param(Limit(0), [pod("a", 1)], over("a"), id="a hard block"),
        pytest.param(
            Limit(400, 4000),
            [pod("a", 50, 2, charge=Charge(50, 3000)), pod("b", 50, 1, charge=Charge(50, 1001))],
            over("b"),
            id="memory",
        ),
        pytest.param(
            Limit(400, 4000),
            [pod("a", 300, 2), pod("b", 50, 1, charge=Charge(50, 1000))],
            [],
            id="memory of whole cards is their share of the limit",
        ),
    ],
)
def test_what_is_found_under_a_limit(limit: Limit, pods: list[StoredPod], expected: list[tuple[str, str]]) -> None:
    assert found(*pods, quota=NamespaceQuota({"M40": limit})) == expected


def one(*pods: StoredPod, quota: NamespaceQuota = FOUR) -> Finding:
    """Return the one finding."""
    [finding] = audit("team-a", quota, pods, AT)
    return finding


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        pytest.param(
            one(pod("a", 300, 2), pod("b", 200, 1)),
            "beyond GPU quota: M40 in namespace team-a, used: 5 cards, limited: 4 cards; this pod takes 2 cards and"
            " does not fit beside the older ones",
            id="cores",
        ),
        pytest.param(
            one(
                pod("a", charge=Charge(50, 3000), age=2),
                pod("b", charge=Charge(50, 2000)),
                quota=NamespaceQuota({"M40": Limit(400, 4000)}),
            ),
            "beyond GPU quota: memory of M40 in namespace team-a, used: 5000 MiB, limited: 4000 MiB; this pod takes"
            " 2000 MiB and does not fit beside the older ones",
            id="memory",
        ),
        pytest.param(
            one(pod("a", model="P100")),
            "namespace team-a may not use GPU model P100; the models that it may use: M40",
            id="not allowed",
        ),
        pytest.param(
            one(pod("a", model="P100"), quota=NamespaceQuota({})),
            "namespace team-a may not use GPU model P100; the models that it may use: none",
            id="none allowed",
        ),
        pytest.param(
            one(pod("a", model=None)),
            "the GPU quota of namespace team-a does not count it: it is held to no model and runs on none",
            id="unpinned",
        ),
    ],
)
def test_what_is_said(finding: Finding, message: str) -> None:
    assert finding.message == message


@pytest.mark.parametrize("mode", Mode)
def test_only_a_quota_that_enforces_has_pods_evicted_and_never_one_that_it_does_not_count(mode: Mode) -> None:
    quota = NamespaceQuota({"M40": Limit(0)}, mode=mode)
    pods = [pod("a"), pod("b", model="P100"), pod("c", model=None)]
    evictable = {finding.kind: finding.evictable for finding in audit("team-a", quota, pods, AT)}
    enforced = mode == Mode.ENFORCE
    assert evictable == {Kind.OVER_QUOTA: enforced, Kind.NOT_ALLOWED: enforced, Kind.UNPINNED: False}


def test_a_mirror_pod_is_told_of_and_not_evicted() -> None:
    """Its static pod would run on, and be shown anew."""
    finding = one(pod("static", 500, node="gpu-1", mirror=True))
    assert not finding.evictable
    assert finding.message.endswith("; it shows a static pod, which only its manifest on node gpu-1 can end")


def pod_lists() -> st.SearchStrategy[list[StoredPod]]:
    """Pods of three models or none, of all ages, some finished, some terminating."""
    charges = st.builds(Charge, st.integers(0, 300), st.integers(0, 2000), st.integers(0, 300))
    one_pod = st.builds(
        pod,
        st.just("a"),
        age=st.integers(0, 23),
        charge=charges,
        model=st.sampled_from(["M40", "P100", "A100", None]),
        node=st.sampled_from(["", "gpu-1"]),
        live=st.sampled_from([True, True, True, False]),
        terminating=st.sampled_from([False, False, True]),
    )
    return st.lists(one_pod, max_size=8).map(named)


def named(pods: Sequence[StoredPod]) -> list[StoredPod]:
    """Return the pods, each with a name of its own."""
    return [msgspec.structs.replace(each, name=f"p{at}", uid=f"uid-p{at}") for at, each in enumerate(pods)]


def quotas() -> st.SearchStrategy[NamespaceQuota]:
    """One or two models, with or without a limit of memory."""
    limits = st.builds(Limit, st.sampled_from([0, 100, 400, 900]), st.sampled_from([None, 0, 1000, 5000]))
    return st.dictionaries(st.sampled_from(["M40", "P100"]), limits).map(NamespaceQuota)


def charge_on(model: str, pods: Sequence[StoredPod]) -> Charge:
    return total(each.charge for each in pods if each.model_on(AT) == model)


@given(quotas(), pod_lists())
def test_without_what_is_found_the_rest_fits_with_any_one_back_it_does_not_and_the_older_stay(
    quota: NamespaceQuota, pods: list[StoredPod]
) -> None:
    findings = [f for f in audit("team-a", quota, pods, AT) if f.kind != Kind.UNPINNED]
    evicted = {finding.pod.uid for finding in findings}
    staying = [each for each in pods if each.live and not each.terminating]
    kept = [each for each in staying if each.uid not in evicted]
    for model in ("M40", "P100", "A100"):
        limit = quota.limits.get(model, Limit(0))
        used = charge_on(model, kept)
        assert fits(limit, Charge(), used)
        for gone in (f.pod for f in findings if f.pod.model_on(AT) == model):
            older = [each for each in kept if (each.created, each.name) < (gone.created, gone.name)]
            assert not fits(limit, charge_on(model, older), gone.charge)
            assert not fits(limit, used, gone.charge)


@given(quotas(), pod_lists())
def test_while_those_that_are_evicted_end_no_other_pod_is_found(quota: NamespaceQuota, pods: list[StoredPod]) -> None:
    found_now = audit("team-a", quota, pods, AT)
    gone = {finding.pod.uid for finding in found_now if finding.evictable}
    after = [msgspec.structs.replace(each, terminating=each.terminating or each.uid in gone) for each in pods]
    left = {finding.pod.uid for finding in audit("team-a", quota, after, AT)}
    assert left == {finding.pod.uid for finding in found_now} - gone


@pytest.mark.parametrize(
    ("metadata", "terminating"), [({}, False), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, True)]
)
def test_a_pod_whose_deletion_was_accepted_is_terminating(metadata: dict[str, str], terminating: bool) -> None:
    manifest = vcuda_pod(metadata={"uid": "u", **metadata})
    stored = read_stored(view(manifest), LABELS)
    assert stored
    assert stored.terminating is terminating
