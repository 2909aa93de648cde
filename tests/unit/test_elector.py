"""Tests of the leader election. They check which candidate takes the Lease, and when a leader must stop."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.elector import Elector, LeaseTiming
from controller.metrics import register_leading
from tests.api_double import ApiDouble, Delivery, Effect, Script, before, delivered, lost_reply, lost_request
from vcuda.errors import Unavailable

LEASE = "/apis/coordination.k8s.io/v1/namespaces/vcuda-quota/leases/vcuda-controller"
TIMING = LeaseTiming.of(30)


class Candidate:
    """A candidate for the Lease. Its clock advances only while it waits. A true ``meanwhile`` stops the candidate."""

    def __init__(self, api: ApiDouble, identity: str = "us", timing: LeaseTiming = TIMING) -> None:
        self.now = 1000.0
        self.meanwhile: Callable[[], bool] = lambda: False
        place = ("vcuda-quota", "vcuda-controller")
        self.elector = Elector(api.kube, place, identity, timing=timing, wait=self._wait, clock=lambda: self.now)

    def stops_after(self, seconds: float) -> None:
        until = self.now + seconds
        self.meanwhile = lambda: self.now > until

    def acquires_within(self, seconds: float) -> bool:
        self.stops_after(seconds)
        return self.elector.acquire()

    def holds_for(self, seconds: float) -> bool:
        self.stops_after(seconds)
        return self.elector.hold()

    def _wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.meanwhile()


@pytest.fixture
def us(api: ApiDouble) -> Candidate:
    return Candidate(api)


def held_by(api: ApiDouble, holder: str, **spec: Any) -> None:
    """Store the Lease as if the named holder had just renewed it."""
    given = {"holderIdentity": holder, "leaseDurationSeconds": 30, "leaseTransitions": 4}
    api.store(LEASE, {"metadata": {"name": "vcuda-controller"}, "spec": {**given, **spec}})


def spec_of(api: ApiDouble) -> dict[str, Any]:
    spec: dict[str, Any] = api.objects[LEASE]["spec"]
    return spec


def slow(candidate: Candidate, part: float = 1.0) -> Delivery:
    """Return a network in which every call fails after this fraction of its timeout."""

    def deliver(_method: str, timeout: float, _effect: Effect) -> bytes:
        candidate.now += timeout * part
        raise Unavailable("timed out")

    return deliver


# Tests of taking the Lease


def test_a_missing_lease_is_created(api: ApiDouble, us: Candidate) -> None:
    assert us.acquires_within(0)
    spec = spec_of(api)
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("us", 30, 0)
    assert spec["acquireTime"] == spec["renewTime"]


# The Lease may already name this candidate, if an earlier attempt took the Lease and its answer was lost.
@pytest.mark.parametrize(("holder", "transitions"), [("", 5), (None, 5), ("us", 4)], ids=["free", "never", "its own"])
def test_a_lease_without_another_holder_is_taken(
    api: ApiDouble, us: Candidate, holder: str | None, transitions: int
) -> None:
    held_by(api, "", holderIdentity=holder, acquireTime="then")
    assert us.acquires_within(0)
    spec = spec_of(api)
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("us", transitions)
    assert (spec["acquireTime"] == "then") is (holder == "us")


def test_a_lease_that_is_renewed_is_never_taken(api: ApiDouble, us: Candidate) -> None:
    def renewed() -> bool:
        if us.now % 28 == 0:  # another holder renews the Lease every 28 s, before it expires
            held_by(api, "them")
        return us.now > 2000

    held_by(api, "them")
    us.meanwhile = renewed
    assert not us.elector.acquire()
    assert spec_of(api)["holderIdentity"] == "them"


@pytest.mark.parametrize(
    ("spec", "waits"),
    [
        # The clock of another process wrote the renewal time in the Lease. The candidate ignores this time.
        *(({"renewTime": at}, 30) for at in ("2001-01-01T00:00:00.000000Z", "2099-01-01T00:00:00.000000Z", None)),
        *(({"leaseDurationSeconds": declared}, waits) for declared, waits in ((60, 60), (10, 10), (None, 30), (0, 30))),
    ],
)
def test_a_lease_lasts_for_its_duration_since_it_was_seen(
    api: ApiDouble, us: Candidate, spec: dict[str, Any], waits: int
) -> None:
    held_by(api, "them", **spec)
    assert not us.acquires_within(waits - 2)
    assert us.acquires_within(2)
    assert spec_of(api)["leaseTransitions"] == 5


def test_a_candidate_that_saw_nothing_for_long_waits_a_full_lease_duration_again(api: ApiDouble, us: Candidate) -> None:
    """The holder may have renewed the Lease while the candidate could not reach the API server."""
    held_by(api, "them")
    assert not us.acquires_within(2)
    api.deliver = lost_request
    assert not us.acquires_within(100)
    held_by(api, "them")
    api.deliver = delivered
    assert not us.acquires_within(28)
    assert us.acquires_within(2)


def overtaken(api: ApiDouble, method: str) -> Delivery:
    return before(method, lambda: held_by(api, "them"))


def test_a_candidate_that_loses_the_race_for_a_free_lease_waits(api: ApiDouble, us: Candidate) -> None:
    for method in ("POST", "PUT"):
        api.deliver = overtaken(api, method)
        assert not us.acquires_within(0)
        assert spec_of(api)["holderIdentity"] == "them"
        held_by(api, "")


def garbage(_method: str, _timeout: float, effect: Effect) -> bytes:
    effect()
    return b"<html>a proxy's own idea</html>"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("delivery", [lost_request, lost_reply, garbage])
def test_every_failure_is_a_failed_attempt(api: ApiDouble, us: Candidate, method: str, delivery: Delivery) -> None:
    if method == "GET" and delivery is garbage:
        held_by(api, "")
    api.deliver = Script(*[delivery] * 3, methods=(method,))
    assert us.acquires_within(20)
    assert spec_of(api)["holderIdentity"] == "us"


def test_a_stopped_candidate_does_not_take_the_lease(api: ApiDouble, us: Candidate) -> None:
    held_by(api, "them")
    us.meanwhile = lambda: True
    assert not us.elector.acquire()


# Tests of holding the Lease


@pytest.fixture
def leader(us: Candidate) -> Candidate:
    assert us.acquires_within(0)
    return us


def test_a_leader_renews_its_lease_until_it_is_stopped(api: ApiDouble, leader: Candidate) -> None:
    before = dict(spec_of(api))
    assert leader.holds_for(100)
    assert api.calls.count("PUT") == 100
    spec = spec_of(api)
    assert (spec["acquireTime"], spec["leaseTransitions"]) == (before["acquireTime"], 0)
    assert spec["renewTime"] > before["renewTime"]


def test_an_api_server_that_is_down_for_10_seconds_does_not_end_the_leadership(
    api: ApiDouble, leader: Candidate
) -> None:
    until, network = leader.now + 10, slow(leader)

    def away(method: str, timeout: float, effect: Effect) -> bytes:
        return network(method, timeout, effect) if leader.now < until else effect()

    api.deliver = away
    assert leader.holds_for(60)


@pytest.mark.parametrize("lease_seconds", [5, 15, 30, 600])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0], ids=["connection refused", "slow", "timeout"])
def test_a_leader_that_cannot_renew_stops_before_others_take_over(
    api: ApiDouble, lease_seconds: int, part: float
) -> None:
    timing = LeaseTiming.of(lease_seconds)
    leader = Candidate(api, timing=timing)
    assert leader.acquires_within(0)
    renewed, begun, fails = leader.now, list[float](), slow(leader, part)

    def noted(method: str, timeout: float, effect: Effect) -> bytes:
        begun.append(leader.now - renewed)
        return fails(method, timeout, effect)

    api.deliver = noted
    assert not leader.holds_for(10_000)
    assert timing.renew_deadline < leader.now - renewed < timing.lease_duration
    assert begun[-1] <= timing.renew_deadline, "a later call might be answered after the lease has expired"


def test_a_leader_counts_its_lease_from_before_the_call(api: ApiDouble) -> None:
    """Other candidates measure the lease from the write. So the leader must not measure it from a later answer."""
    us = Candidate(api)
    written = 0.0

    def slow_answer(_method: str, timeout: float, effect: Effect) -> bytes:
        nonlocal written
        answer, written = effect(), us.now
        us.now += timeout
        return answer

    api.deliver = Script(slow_answer)
    assert us.acquires_within(0)
    api.deliver = lost_request
    assert not us.holds_for(10_000)
    assert us.now - written <= TIMING.renew_deadline + TIMING.retry_period


def test_another_holder_ends_the_leadership_at_once(api: ApiDouble, leader: Candidate) -> None:
    held_by(api, "them")
    before = leader.now
    assert not leader.holds_for(100)
    assert leader.now == before + TIMING.retry_period
    assert spec_of(api)["holderIdentity"] == "them"


@pytest.mark.parametrize("delivery", [lost_reply, garbage])
def test_a_lost_answer_does_not_end_the_leadership(api: ApiDouble, leader: Candidate, delivery: Delivery) -> None:
    api.deliver = Script(*[delivery] * 5)
    assert leader.holds_for(60)
    assert spec_of(api)["holderIdentity"] == "us"


def test_a_deleted_lease_is_recreated(api: ApiDouble, leader: Candidate) -> None:
    api.remove(LEASE)
    assert leader.holds_for(10)
    assert spec_of(api)["holderIdentity"] == "us"


# Tests of the silence of another leader


def test_a_leader_is_silent_since_a_candidate_last_saw_it_renew_the_lease(api: ApiDouble, us: Candidate) -> None:
    assert us.elector.silence == 0.0, "the Lease has not been read yet"
    held_by(api, "them")
    assert not us.acquires_within(4)
    assert us.elector.silence >= 4
    held_by(api, "them")
    assert not us.acquires_within(0)
    assert us.elector.silence <= TIMING.retry_period


def test_an_own_lease_is_never_silent(leader: Candidate) -> None:
    leader.now += 20
    assert leader.elector.silence == 0.0


# Tests of releasing the Lease


def test_another_candidate_takes_a_released_lease_at_once(api: ApiDouble, leader: Candidate) -> None:
    them = Candidate(api, "them")
    assert not them.acquires_within(4)
    leader.elector.release()
    assert them.acquires_within(0)
    assert spec_of(api)["leaseTransitions"] == 1


def test_the_lease_is_released_although_the_last_renewal_got_no_answer(api: ApiDouble, leader: Candidate) -> None:
    api.deliver = Script(lost_reply)
    assert leader.holds_for(TIMING.retry_period)
    leader.elector.release()
    assert Candidate(api, "them").acquires_within(0)


@pytest.mark.parametrize("taken_before", ["GET", "PUT"])
def test_another_s_lease_is_not_released(api: ApiDouble, leader: Candidate, taken_before: str) -> None:
    api.deliver = overtaken(api, taken_before)
    leader.elector.release()
    assert spec_of(api)["holderIdentity"] == "them"


@pytest.mark.parametrize("delivery", [lost_request, garbage])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_release_that_fails_is_no_error(api: ApiDouble, leader: Candidate, delivery: Delivery, method: str) -> None:
    api.deliver = Script(delivery, methods=(method,))
    leader.elector.release()
    api.objects.clear()
    leader.elector.release()
    assert api.objects == {}, "there must be no Lease to release"


# Tests of what is logged


def warnings_within(candidate: Candidate, api: ApiDouble, seconds: float) -> list[float]:
    """Make the API server unreachable. Return the number of seconds that each logged warning reports."""
    api.deliver = slow(candidate)
    with structlog.testing.capture_logs() as logs:
        assert not candidate.acquires_within(seconds)
    return [line["seconds"] for line in logs if line["event"] == "the Lease cannot be read or written"]


def test_an_unreachable_lease_is_logged_within_10_seconds_and_then_at_growing_intervals(
    api: ApiDouble, us: Candidate
) -> None:
    told = warnings_within(us, api, 600)
    assert told[0] < 10
    gaps = [later - earlier for earlier, later in pairwise(told)]
    assert gaps == sorted(gaps)
    assert len(told) < 10


def test_a_short_failure_is_not_logged(api: ApiDouble, us: Candidate) -> None:
    assert warnings_within(us, api, 4) == []


def test_the_gauge_shows_the_leader(api: ApiDouble, us: Candidate) -> None:
    registry = CollectorRegistry()
    register_leading(registry, lambda: us.elector.is_leading)

    def leading() -> float | None:
        return registry.get_sample_value("vcuda_controller_leading")

    assert leading() == 0
    assert us.acquires_within(1)
    assert leading() == 1
    held_by(api, "another")
    assert not us.holds_for(60)
    assert leading() == 0
