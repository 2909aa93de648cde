"""Tests of the search for claims and pods that exceed their quota. Claims are reported, and never deleted."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import EvictionMetrics
from controller.violations.violation_watcher import Evictor, event_of
from controller.violations.violations import PricedClaim, Violation, find_violations
from tests.builders import LABELS, MODEL, nodes
from tests.tables import cases
from tests.violation_world import Cluster, Watched
from vcuda.allocations.given_cards import OtherCard
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.digest import ClaimDigest, pack
from vcuda.errors import Unavailable
from vcuda.kube import LedgerStore, NodeInformer
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota

AT = nodes(**{"gpu-1": {MODEL: "P100"}})
TWO = NamespaceQuota({"M40": Limit(200)})
FAULT = "spec.devices.requests[0].exactly.allocationMode: must be ExactCount, with a count; got All"
CARD = Charge(100, 0, 100)


def pod(name: str, age: int, cards: int = 1, **fields: Any) -> StoredPod:
    created = f"2026-01-01T{23 - age:02}:00:00Z"
    return StoredPod(f"uid-{name}", "team-a", name, "M40", "", True, Charge(100 * cards), created, **fields)


def claim(name: str, age: int = 1, *, terminating: bool = False, given: int = 0, **taken: Any) -> PricedClaim:
    """Return a claim that was created ``age`` hours ago. ``given``: the number of P100 cards allocated to it."""
    created = f"2026-01-01T{23 - age:02}:00:00Z"
    stored = StoredClaim(f"uid-{name}", "team-a", name, pack(ClaimDigest()), (), created, terminating)
    charges = {"M40": CARD, **({"P100": Charge(100 * given)} if given else {})}
    return stored, ClaimCharge(**{"charges": charges, "pinned": "M40", **taken})


def uncounted(name: str, **fields: Any) -> PricedClaim:
    return claim(name, charges={}, pinned=None, uncounted=True, **fields)


def found(*holders: StoredPod | PricedClaim, quota: NamespaceQuota = TWO) -> list[Violation]:
    pods = [each for each in holders if isinstance(each, StoredPod)]
    claims = [each for each in holders if isinstance(each, tuple)]
    return list(find_violations("team-a", quota, pods, AT, claims))


OTHER = OtherCard("M40", "gpu-1", "gpu-0", "Tesla P100", ("P100",))
BOTH = NamespaceQuota({"M40": Limit(200), "P100": Limit(100)})


@cases(
    "holders, quota, expected",
    within=([claim("a", 2), claim("b")], TWO, []),
    the_newest=([claim("a", 3), claim("b", 2), claim("c")], TWO, [("c", "over-quota")]),
    the_newest_of_pods_and_claims=([claim("a", 3), pod("b", 2, 2), claim("c")], TWO, [("b", "over-quota")]),
    one_that_goes=([claim("a", 3), claim("b", 2), claim("c", terminating=True)], TWO, []),
    of_a_model_that_is_not_allowed=([claim("a", charges={"A100": CARD}, pinned="A100")], TWO, [("a", "not-allowed")]),
    given_another_models_card=([claim("a", given=1, other=OTHER)], BOTH, [("a", "other-model")]),
    given_one_that_is_not_allowed=([claim("a", given=1, other=OTHER)], TWO, [("a", "not-allowed")]),
    given_too_many_of_another=([claim("a", given=2, other=OTHER)], BOTH, [("a", "over-quota")]),
    pinned_to_none_and_given_nothing=([uncounted("a")], TWO, [("a", "unpinned")]),
    pinned_to_none_and_goes=([uncounted("a", terminating=True)], TWO, []),
    pinned_to_none_and_counted_by_its_devices=([claim("a", pinned=None)], TWO, []),
    asked_for_in_a_way_that_is_rejected=([claim("a", fault=FAULT)], TWO, [("a", "not-allowed")]),
    without_a_charge=([claim("a", charges={}, pinned=None)], TWO, []),
)
def test_claims_that_the_quota_would_not_admit_are_found(
    holders: list[StoredPod | PricedClaim], quota: NamespaceQuota, expected: list[tuple[str, str]]
) -> None:
    assert [(each.stored.name, each.kind.value) for each in found(*holders, quota=quota)] == expected


@cases(
    "holders, reason, said",
    beyond=(
        [claim("a", 2), claim("b", charges={"M40": Charge(200)})],
        "BeyondQuota",
        "beyond GPU quota: M40 in namespace team-a, used: 3 cards, limited: 2 cards; this claim takes 2 cards and",
    ),
    another_models_card=(
        [claim("a", given=1, other=OTHER)],
        "OtherModelAllocated",
        (
            "the pod or claim is charged to M40, but was given card gpu-0 of node gpu-1, a Tesla P100, of model P100; "
            "the claim is charged for both models"
        ),
    ),
    of_no_model=(
        [uncounted("a")],
        "NotCounted",
        "the GPU quota of namespace team-a does not count this claim, because the claim selects",
    ),
    asked_for_so=([claim("a", fault=FAULT)], "BeyondQuota", f"namespace team-a would not admit this claim: {FAULT}"),
    of_no_model_and_asked_for_so=([uncounted("a", fault=FAULT)], "NotCounted", f"have it counted. {FAULT}"),
)
def test_a_claim_is_reported_by_an_event_on_it(holders: list[PricedClaim], reason: str, said: str) -> None:
    [violation] = found(*holders, quota=BOTH)
    event = event_of(violation)
    assert (event.subject.kind, event.subject.api_version) == ("ResourceClaim", "resource.k8s.io/v1")
    assert (event.subject.uid, event.reason) == (violation.stored.uid, reason)
    assert said in event.message


@pytest.mark.parametrize("mode", Mode)
def test_no_claim_is_ever_evicted(mode: Mode) -> None:
    violations = found(claim("a", 3), claim("b", 2), claim("c"), quota=NamespaceQuota({"M40": Limit(0)}, mode=mode))
    assert [(each.stored.name, each.evictable) for each in violations] == [(name, False) for name in "cba"]


# Tests in which an API server double stores the objects

CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims"


@pytest.mark.parametrize("mode", ["enforce", "warn", "audit"])
def test_each_claim_is_reported_once_and_counted_with_the_pods(mode: str) -> None:
    api, claims = Cluster(), [claim("old", 3), claim("new"), uncounted("free")]
    api.limit({"quota": {"M40": 1}, "mode": mode})
    watched = Watched(api, enforce=False, claims=claims)
    for _ in range(3):
        watched.look()
    told = [] if mode == "audit" else [("free", "NotCounted"), ("new", "BeyondQuota")]
    assert (api.told(), api.calls.count("POST")) == (told, len(told))
    for finding in ("over-quota", "unpinned"):
        assert watched.counted("claims", namespace="team-a", finding=finding) == 1
        assert watched.counted("pods", namespace="team-a", finding=finding) is None
    claims.clear()
    watched.look()
    assert watched.watcher.ongoing() == []


def test_a_pod_is_evicted_because_of_older_claims_only_if_these_are_known() -> None:
    """While the charge of any stored claim is unknown, no pod is evicted."""
    api = Cluster()
    api.limit({"quota": {"M40": 2}})
    api.add("new", hour=22)
    prices = [None, ClaimCharge({"M40": Charge(200)}, "M40")]
    api.store(f"{CLAIMS}/a", {"metadata": {"name": "a", "uid": "uid-a", "creationTimestamp": "2026-01-01T20:00:00Z"}})

    def price() -> Any:
        found = prices.pop(0)
        return (lambda _: found) if found else None

    store = LedgerStore(api.kube, "vcuda-quota", lambda: AT, claim_price=price)
    metrics, nodes = EvictionMetrics(CollectorRegistry()), NodeInformer(api.kube, LABELS)
    evictor = Evictor(api.kube, store, Watched(api).quota, nodes, metrics)
    with pytest.raises(Unavailable, match="devices"):
        evictor.evict_newest("team-a", {"uid-new": 0})
    assert evictor.evict_newest("team-a", {"uid-new": 0}) == "uid-new"
