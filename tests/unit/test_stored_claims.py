"""Tests of the charges of stored ResourceClaims, which a LIST or the watch has delivered."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonpatch
import pytest
import structlog

from controller.pods import REMEMBER_GONE_SECONDS
from controller.retry.claim_retrier import MAX_AT_ONCE, ClaimRetrier
from controller.seen_events import CLAIM_REASON
from examples.claims import CLASSES, NODES, NVIDIA, claim, claim_policy, view
from tests.api_double import ApiDouble
from tests.builders import Manifest, stored_pod
from tests.replicas import CARD, POD, Clock
from tests.tables import cases
from tests.watching import catch_up, claim_informer
from vcuda.allocations.stored_claims import ClaimCounter, ClaimReader, StoredClaim
from vcuda.claims.request import read_claim
from vcuda.errors import NotFound, Unavailable
from vcuda.kube import DeviceInformer, LedgerStore, ServedWatches
from vcuda.ledger.ledger import UNSEEN_SECONDS, Ledger, Pending
from vcuda.ledger.recount import ObservedClaims, ObservedPods, recount
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.quota.model import Charge
from vcuda.quota.rejections import OVER_QUOTA

ONE, TWO = Charge(100, 0, 100), Charge(200, 0, 200)
COUNTER = ClaimCounter(claim_policy())
READER = ClaimReader()
OWN = "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaims/{}"


def pinned(name: str, *requests: Manifest, **fields: Any) -> Manifest:
    """Return a claim as the API server stores it: with a uid, and restricted to model A100 by /mutate."""
    bare = claim(*requests, name=name, uid=f"{name}-uid", namespace="team-a")
    patch = read_claim(view(bare), claim_policy()).patch("A100")
    return {**jsonpatch.apply_patch(bare, json.dumps(patch)), **fields}


def stored(manifest: Manifest) -> StoredClaim:
    return READER.read(json.dumps(manifest).encode())


M40_CARD, A100_CARD, SLICE, AWAY = (
    (NVIDIA, *name) for name in (("old", "gpu-0"), ("new", "gpu-0"), ("new", "3g.20gb"), ("gone", "gpu-0"))
)


def given(manifest: Manifest, *devices: tuple[str, str, str], request: str = "r0") -> Manifest:
    """Return the claim with an allocation of these devices by the scheduler."""
    results = [dict(zip(("driver", "pool", "device"), each, strict=True), request=request) for each in devices]
    return {**manifest, "status": {"allocation": {"devices": {"results": results}}}}


ALL = {"deviceClassName": NVIDIA, "allocationMode": "All"}
MIG = {"deviceClassName": "mig.nvidia.com"}
UNKNOWN = {"deviceClassName": "unknown"}
PAIR = {"deviceClassName": NVIDIA, "count": 2}


@cases(
    "manifest, charges",
    held_to_a_model=(pinned("a"), {"A100": ONE}),
    held_and_given_just_that=(given(pinned("a"), A100_CARD), {"A100": ONE}),
    held_to_none=(claim(), {}),
    held_to_none_and_given_a_device=(given(claim(), A100_CARD), {"A100": ONE}),
    of_a_class_that_nobody_knows=(claim(UNKNOWN), {}),
    given_a_card_by_such_a_class=(given(claim(UNKNOWN), M40_CARD), {"M40": ONE}),
    given_another_models_card=(given(pinned("a"), M40_CARD), {"A100": ONE, "M40": ONE}),
    given_one_of_another_model_beside_its_own=(
        given(pinned("a", PAIR), M40_CARD, A100_CARD),
        {"A100": TWO, "M40": ONE},
    ),
    given_devices_of_two_models=(given(claim(PAIR), M40_CARD, A100_CARD), {"A100": ONE, "M40": ONE}),
    all_devices_that_there_are=(given(claim(ALL), *[A100_CARD] * 3), {"A100": Charge(300, 0, 300)}),
    a_partition_by_its_class=(given(claim(MIG), SLICE), {"A100": Charge(50, 20480)}),
    one_that_is_known_and_one_that_is_not=(given(claim(PAIR), A100_CARD, AWAY), {"A100": TWO}),
    held_and_given_one_that_is_not_known=(given(pinned("a"), AWAY), {"A100": ONE}),
    given_nothing_that_is_known=(given(claim(), AWAY), {}),
)
def test_a_claim_is_charged_by_its_spec_and_its_status_only_raises_that(
    manifest: Manifest, charges: Mapping[str, Charge]
) -> None:
    taken = COUNTER(stored(manifest))
    assert taken.charges == charges
    assert COUNTER(stored(manifest)) == taken
    assert taken.uncounted is (not charges)


@cases(
    "manifest, told",
    its_own=(given(pinned("a"), A100_CARD), ""),
    anothers=(
        given(pinned("a"), A100_CARD, M40_CARD),
        "the pod or claim is charged to A100, but was given card gpu-0 of node old, a Tesla M40 24GB, of model M40",
    ),
    not_known=(given(pinned("a"), AWAY), ""),
    held_to_none=(given(claim(), M40_CARD), ""),
)
def test_a_device_of_another_model_than_the_claims_is_reported(manifest: Manifest, told: str) -> None:
    assert str(COUNTER(stored(manifest)).other or "") == told


def test_claims_of_one_spec_keep_one_digest() -> None:
    assert stored(pinned("a")).digest is stored(pinned("b")).digest


# Tests of claims that are counted by a LIST


def extended(name: str, **status: str) -> Manifest:
    """Return a pod that requests extended resources, for which the scheduler has created the claim ``name``."""
    pod = stored_pod({"nvidia.com/gpu": 1}, uid="pod-uid")
    return {**pod, "status": {**status, "extendedResourceClaimStatus": {"resourceClaimName": name}}}


@pytest.fixture
def store(api: ApiDouble) -> LedgerStore:
    return LedgerStore(api.kube, "vcuda-quota", lambda: NODES, claim_price=lambda: COUNTER)


@cases(
    "pod, claimed",
    its_pod_is_charged=(extended("b"), {"A100": ONE}),
    its_pod_has_ended=(extended("b", phase="Succeeded"), {"A100": TWO}),
    the_status_names_another_claim=(extended("other"), {"A100": TWO}),
    its_pod_has_no_GPU_request=({**extended("b"), "spec": {"containers": []}}, {"A100": TWO}),
)
def test_a_claim_is_left_out_only_if_a_charged_pods_status_names_it(
    api: ApiDouble, store: LedgerStore, pod: Manifest, claimed: Mapping[str, Charge]
) -> None:
    for name in ("a", "b"):
        api.store(OWN.format(name), pinned(name, metadata={**pinned(name)["metadata"], "ownerReferences": []}))
    api.store(POD, pod)
    for ledger in (store.read("team-a").ledger, store.open("team-a").ledger):
        assert (ledger.claimed, ledger.claim_resource_version) == (claimed, ledger.pod_resource_version)


def test_without_published_devices_claims_are_not_counted_as_free(api: ApiDouble) -> None:
    store = LedgerStore(api.kube, "vcuda-quota", lambda: NODES)
    assert store.count_pods("team-a").claims == ObservedClaims("100", {}, {}.keys(), since="100", users=set())
    api.store(OWN.format("a"), pinned("a"))
    with pytest.raises(Unavailable, match="devices"):
        store.count_pods("team-a")
    assert store.stored_uids("team-a") == {"a-uid"}


def test_no_claims_are_counted_if_the_api_server_does_not_serve_them(api: ApiDouble, store: LedgerStore) -> None:
    def listed(path: str, *_: object, **__: object) -> Iterator[object]:
        raise NotFound(404, path)

    api.list_pages = listed  # type: ignore[method-assign, assignment]  # the answer of an API server of Kubernetes 1.30
    assert store.priced_claims("team-a", ()) == ("", [])
    assert store.count_claims("team-a", ()) is None


# Tests of claims that are counted by the watch


def test_a_claim_is_charged_until_it_is_deleted_and_its_pending_charge_counts_once(
    api: ApiDouble, store: LedgerStore
) -> None:
    clock, changed = Clock(), list[str]()
    informer = claim_informer(api, store, changed.append, clock.monotonic)
    assert informer.observed("team-a", (), UNSEEN_SECONDS) is None
    pending = {f"{name}-uid": Pending("A100", CARD) for name in ("a", "b")}
    ledger = Ledger({}, "99", pending)

    def recounted(*left_out: str) -> Ledger:
        catch_up(informer.reflector)
        return recount(
            ledger, ObservedPods("100", {}, (), claims=informer.observed("team-a", left_out, UNSEEN_SECONDS))
        )

    api.store(OWN.format("a"), pinned("a"))
    api.store(OWN.format("x"), claim(name="x", uid="x-uid", namespace="team-a"))
    ledger = recounted()
    assert (ledger.claimed, [*ledger.pending]) == ({"A100": ONE}, ["b-uid"])
    assert recounted("a").claimed == {}
    api.remove(OWN.format("a"))
    ledger = recounted()
    assert (ledger.claimed, [*ledger.pending], {*changed}) == ({}, ["b-uid"], {"team-a"})
    clock.pass_by(REMEMBER_GONE_SECONDS + 1)
    assert [*informer.namespaces()] == ["team-a"]


@cases(
    "counted, pending, listed",
    it_says_the_same=(ONE, (), False),
    it_says_another_count=(TWO, (), True),
    what_is_pending_there_has_been_seen=(ONE, ("a",), True),
    what_is_pending_there_has_yet_to_come=(ONE, ("b",), False),
)
def test_while_the_watch_is_quiet_claims_are_listed_only_if_the_ledger_differs(
    api: ApiDouble, store: LedgerStore, counted: Charge, pending: tuple[str, ...], *, listed: bool
) -> None:
    """Without events, a watch stays at an old version. If only the version counted, each recount would need a LIST."""
    admitted = {f"{name}-uid": Pending("A100", CARD) for name in pending}
    ledger = Ledger(pending=admitted, claimed={"A100": counted}, claim_resource_version="999")
    informer = claim_informer(api, store)
    api.store(OWN.format("a"), pinned("a"))
    catch_up(informer.reflector)
    api.forget_calls()
    found = informer.as_new_as(ledger, "team-a", ())
    assert (bool(api.calls), found is not None) == (listed, listed)
    if found is None:
        assert recount(ledger, ObservedPods("999", {}, ())).claimed == ledger.claimed


def test_a_list_and_the_watch_count_a_claims_devices_alike_and_once(api: ApiDouble, store: LedgerStore) -> None:
    api.store(OWN.format("a"), given(pinned("a"), M40_CARD))
    informer = claim_informer(api, store)
    catch_up(informer.reflector)
    counted, watched = store.count_claims("team-a", ()), informer.observed("team-a", (), UNSEEN_SECONDS)
    assert counted
    assert watched
    assert counted.committed == watched.committed == {"A100": ONE, "M40": ONE}


@cases(
    "requests, taken",
    one_of_two=([{"deviceClassName": "mine"}, {"deviceClassName": NVIDIA}], TWO),
    the_only_one=([{"deviceClassName": "mine"}], ONE),
)
def test_while_a_class_is_deleted_a_claim_keeps_its_charge(
    api: ApiDouble, requests: list[Manifest], taken: Charge
) -> None:
    """The leader remembers the charge that the claim had before its DeviceClass was deleted."""
    own = {"mine": CLASSES["gpu.nvidia.com"]}
    with_class = ClaimCounter(claim_policy(classes={**CLASSES, **own}))
    known = claim(*requests, name="a", uid="a-uid", namespace="team-a")
    patch = read_claim(view(known), claim_policy(classes={**CLASSES, **own})).patch("A100")
    counters = iter([with_class, with_class, COUNTER, COUNTER])
    store = LedgerStore(api.kube, "vcuda-quota", lambda: NODES, claim_price=lambda: next(counters))
    informer = claim_informer(api, store)
    api.store(OWN.format("a"), jsonpatch.apply_patch(known, json.dumps(patch)))
    catch_up(informer.reflector)
    found = [informer.observed("team-a", (), UNSEEN_SECONDS) for _ in range(2)]
    assert [each and each.committed for each in found] == [{"A100": taken}] * 2


# Tests of whether the API server serves claims


def test_watches_begin_when_the_api_server_serves_claims_and_delay_nothing(api: ApiDouble) -> None:
    """At an upgrade to Kubernetes 1.34, the API server begins to serve claims while the controller runs."""
    answers: list[Exception | None] = [Unavailable("away"), NotFound(404, "no such group"), None]
    waited: list[float] = []

    class Served:
        def get(self, path: str) -> bytes:
            answer = answers.pop(0)
            if answer:
                raise answer
            return path.encode()

    watches = ServedWatches(Served(), DeviceInformer(api.kube).reflectors(), wait=lambda s: bool(waited.append(s)))  # type: ignore[arg-type, func-returns-value]
    states = [watches.is_ready, bool(watches.running())]
    with structlog.testing.capture_logs():
        watches.run()
    watches.stop()
    assert (states, waited[-1], watches.is_ready) == ([False, False], 60.0, True)
    assert {*watches.running()} == {"resourceslices", "deviceclasses"}


# Tests of retries of pods that wait for their claims


def report(used: float) -> NamespaceUse:
    return NamespaceUse("team-a", "enforce", (ModelUse("A100", 4, used, 0, 4 - used),))


def rejected(name: str, message: str = f"{OVER_QUOTA}: A100 in namespace team-a", uid: str | None = None) -> Manifest:
    about = {"kind": "Pod", "name": name, "uid": uid or f"{name}-uid"}
    return {"metadata": {"name": f"{name}.1"}, "involvedObject": about, "message": message, "reason": CLAIM_REASON}


def waiting(name: str, *made: str) -> Manifest:
    spec = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]}
    status = {"resourceClaimStatuses": [{"name": each} for each in made]}
    return {"metadata": {"name": name, "uid": f"{name}-uid"}, "spec": spec, "status": status}


EVENTS, PODS = "/api/v1/namespaces/team-a/events", "/api/v1/namespaces/team-a/pods"


def woken(api: ApiDouble) -> list[str]:
    """Return the names of the pods that the retrier has annotated since the last call of `woken`."""
    pods = [each for path, each in api.objects.items() if path.startswith(PODS) and each["metadata"].get("annotations")]
    return sorted(each["metadata"].pop("annotations") and each["metadata"]["name"] for each in pods)


@cases(
    "pod, event, is_woken",
    rejected_for_quota=(waiting("a"), rejected("a"), True),
    its_claim_exists_by_now=(waiting("a", "gpu"), rejected("a"), False),
    rejected_for_another_reason=(waiting("a"), rejected("a", "no such template"), False),
    another_pod_of_this_name_was_rejected=(waiting("a"), rejected("a", uid="of-another"), False),
    gone=(waiting("b"), rejected("a"), False),
    no_name=(waiting("a"), rejected("../../x", uid="a-uid"), False),
)
def test_a_pod_whose_claim_was_rejected_is_woken_when_quota_is_freed(
    api: ApiDouble, pod: Manifest, event: Manifest, *, is_woken: bool
) -> None:
    api.store(f"{PODS}/{pod['metadata']['name']}", pod)
    api.store(f"{EVENTS}/a.1", event)
    retrier = ClaimRetrier(api.kube, lambda: True)
    for used, is_freed in ((4, False), (3, True), (3, False), (2, True)):
        retrier.report("team-a", report(used))
        retrier.reconciler.turn("team-a")
        assert woken(api) == ["a"] * (is_woken and is_freed)
        retrier.reconciler.turn("team-a")
        assert woken(api) == []


def test_some_of_many_waiting_pods_are_woken_per_turn_and_none_without_served_claims(api: ApiDouble) -> None:
    served = [False, True, True]
    for number in range(MAX_AT_ONCE + 5):
        api.store(f"{PODS}/a{number}", waiting(f"a{number}"))
        api.store(f"{EVENTS}/a{number}.1", rejected(f"a{number}"))
    retrier = ClaimRetrier(api.kube, lambda: served.pop(0))
    retrier.report("team-a", report(0))
    counts = []
    for _ in range(3):
        retrier.reconciler.turn("team-a")
        counts.append(len(woken(api)))
    assert counts == [0, MAX_AT_ONCE, 5]
    assert retrier.reconciler.queue.is_active("team-a")


def test_few_pods_of_forged_events_are_looked_up_per_turn(api: ApiDouble) -> None:
    """A user can write many Events, which must not delay the retries in other namespaces."""
    for number in range(3 * MAX_AT_ONCE):
        api.store(f"{EVENTS}/a{number}.1", rejected(f"a{number}"))
    retrier = ClaimRetrier(api.kube, lambda: True)
    retrier.report("team-a", report(0))
    retrier.reconciler.turn("team-a")
    assert (api.calls.count("GET"), retrier.reconciler.queue.is_active("team-a")) == (MAX_AT_ONCE, True)


def test_no_charge_is_kept_of_a_claim_that_is_deleted_while_another_thread_charges_it(
    api: ApiDouble, store: LedgerStore
) -> None:
    informer = claim_informer(api, store)
    for name in ("a", "b"):
        api.store(OWN.format(name), pinned(name))
    catch_up(informer.reflector)
    charging = informer.charges("team-a")
    next(charging)
    for name in ("a", "b"):
        api.remove(OWN.format(name))
    catch_up(informer.reflector)
    assert len([*charging]) == 1
    assert not informer._known
