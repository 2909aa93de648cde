"""Tests of the figures in rejections, which are from a LIST after the request. Other answers have the ledger's."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.api_double import ApiDouble, Effect, Script, before, delivered, lost_request
from tests.builders import MODEL, ONE_CARD, nodes, stored_pod
from tests.replicas import CARD, FOUR, POD, Clock, Gate, Replica, asked, kinds
from tests.tables import cases
from tests.waiting import PATIENT
from vcuda.errors import Unavailable
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Rejected, Reservation, Terminating
from vcuda.ledger.recount import ObservedClaims, ObservedPods
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Usage
from vcuda.requests.resources import GpuResources
from webhook.ledger.charging import Decision, PutOff
from webhook.ledger.fresh_count import MIN_INTERVAL_SECONDS, RECOUNT_SECONDS, REST_PER_SECOND
from webhook.ledger.reservations import SOON_SECONDS

TWO, FULL = CARD + CARD, Charge(400, 0, 400)
TERMINATING = {"gone": Terminating("M40", TWO, 30)}


class Namespace:
    """A namespace whose ledger, pods and clock the test sets. One replica is called for a further pod with one card."""

    def __init__(self, api: ApiDouble) -> None:
        self.api, self.clock = api, Clock()
        self.replica = Replica(api, self.clock)

    def ledger(self, **fields: Any) -> None:
        self.replica.store.write("team-a", Ledger(**fields), self.replica.store.open("team-a"))

    def pods(self, number: int, **fields: Any) -> None:
        """Store ``number`` pods with one card each in the namespace. Delete all its other pods."""
        for path in [path for path in self.api.objects if "/pods/" in path]:
            self.api.remove(path)
        for each in range(number):
            self.api.store(f"{POD}{each}", stored_pod(ONE_CARD, uid=f"stored-{each}", **fields))

    def charge(self, uid: str = "asked", **fields: Any) -> Decision:
        return self.replica.charge(uid, **{"deadline": self.clock.now + PATIENT, **fields})

    def lists(self) -> float:
        return self.replica.counted("lists_total") or 0


@pytest.fixture
def namespace(api: ApiDouble) -> Namespace:
    return Namespace(api)


def pending(number: int, *, prefix: str = "pending") -> dict[str, Pending]:
    return {f"{prefix}-{each}": Pending("M40", CARD) for each in range(number)}


# Tests of whether a charge that exceeds a limit by the ledger is rejected or may be retried

DEAD = {"gone": Reservation({"M40": CARD}, 1)}


@cases(
    "ledger, pods, outcome, soon",
    all_charges_are_of_stored_pods=({"committed": {"M40": FULL}}, 4, Rejected, None),
    pending_pods_are_stored_by_now=({"pending": pending(4, prefix="stored")}, 4, Rejected, None),
    pending_pods_never_stored=({"committed": {"M40": TWO}, "pending": pending(2)}, 2, PutOff, False),
    a_pod_deleted_after_recounting=({"committed": {"M40": FULL}}, 3, PutOff, True),
    stored_and_terminating=({"committed": {"M40": TWO}, "terminating": TERMINATING}, 2, Rejected, None),
    terminating_and_a_deleted_pod=({"committed": {"M40": FULL}, "terminating": TERMINATING}, 1, PutOff, True),
    reserved_by_a_dead_replica=({"committed": {"M40": CARD + TWO}, "reserved": DEAD}, 3, PutOff, True),
    all_stored_and_also_reserved=({"committed": {"M40": FULL}, "reserved": DEAD}, 4, Rejected, None),
)
def test_only_stored_objects_cause_a_rejection_and_any_other_charge_may_be_retried(
    namespace: Namespace, ledger: dict[str, Any], pods: int, outcome: type[Decision], soon: bool | None
) -> None:
    namespace.ledger(**ledger)
    namespace.pods(pods)
    decision = namespace.charge()
    assert isinstance(decision, outcome)
    assert getattr(decision, "soon", None) is soon


def test_a_rejection_has_the_figures_of_the_list_and_a_charge_to_retry_those_of_the_ledger(
    namespace: Namespace,
) -> None:
    namespace.ledger(committed={"M40": TWO}, pending=pending(1), terminating=TERMINATING)
    namespace.pods(2)
    rejected = namespace.charge()
    assert isinstance(rejected, Rejected)
    assert rejected.shortage.usage == Usage(TWO + TWO, terminating=TWO)
    namespace.pods(1)
    put_off = namespace.charge()
    assert isinstance(put_off, PutOff)
    [shortage] = put_off.shortages
    assert shortage.usage == Usage(TWO + TWO + CARD, CARD, TWO)


def test_stored_claims_are_counted_too(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(2)
    count = namespace.replica.store.count_pods
    for claimed, outcome in ((TWO, Rejected), (CARD, PutOff)):
        view = ObservedClaims("1000", {"M40": claimed}, ())
        counted = lambda *args, view=view: msgspec.structs.replace(count(*args), claims=view)  # noqa: E731
        monkeypatch.setattr(namespace.replica.store, "count_pods", counted)
        assert isinstance(namespace.charge(), outcome)


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
def test_without_a_rejection_nothing_is_listed(namespace: Namespace, mode: Mode) -> None:
    namespace.ledger(committed={"M40": FULL})
    assert isinstance(namespace.charge(quota=NamespaceQuota(FOUR.limits, mode=mode)), Admitted)
    namespace.ledger()
    assert isinstance(namespace.charge("another"), Admitted)
    assert namespace.lists() == 0


def test_a_charge_that_can_never_fit_needs_no_list(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": CARD})
    assert isinstance(namespace.charge(charge=Charge(500, 0, 500)), Rejected)
    assert namespace.lists() == 0


def test_a_dry_run_gets_the_same_answer_and_writes_nothing(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(4)
    before = dict(namespace.api.objects)
    assert isinstance(namespace.charge(dry_run=True), Rejected)
    namespace.pods(3)
    assert isinstance(namespace.charge(dry_run=True), PutOff)
    assert {path: each for path, each in namespace.api.objects.items() if "/pods/" not in path} == {
        path: each for path, each in before.items() if "/pods/" not in path
    }


@pytest.mark.parametrize("reserved", [True, False])
def test_a_charge_that_only_reservations_keep_out_sets_a_new_waiting_mark_each_second(
    namespace: Namespace, *, reserved: bool
) -> None:
    namespace.ledger(committed={"M40": CARD + TWO if reserved else FULL}, reserved=DEAD if reserved else {})
    marks = []
    for seconds in (0.5, 0.5, 0):
        namespace.charge()
        marks.append(namespace.replica.store.read("team-a").ledger.waiting)
        namespace.clock.pass_by(seconds)
    first, soon, later = marks
    assert (first != "", soon == first, later != first) == (reserved, True, reserved)


def test_after_two_seconds_a_reservation_is_no_longer_announced_as_ending_soon(namespace: Namespace) -> None:
    """A running replica releases its reservation within two seconds after the announcement. A dead replica does not."""
    namespace.ledger(committed={"M40": CARD + TWO}, reserved=DEAD)
    told = []
    for _ in range(4):
        decision = namespace.charge()
        assert isinstance(decision, PutOff)
        told.append(decision.soon)
        namespace.clock.pass_by(1)
    assert told == [True, True, False, False]
    assert namespace.lists() == 0


# Tests of a LIST whose result all waiting callers share


def reject_many(namespace: Namespace, number: int) -> list[Decision]:
    async def callers() -> list[Decision]:
        deadline = namespace.clock.now + PATIENT
        requests = [asked(f"caller-{each}", deadline=deadline) for each in range(number)]
        return await asyncio.gather(*map(namespace.replica.ledgers.charge, requests))

    return asyncio.run(callers())


def test_all_waiting_calls_share_one_list_and_the_next_list_waits_half_a_second(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(4)
    for number in (1, 2, 3):
        begun = namespace.clock.now
        assert kinds(reject_many(namespace, 16)) == ["Rejected"] * 16
        assert namespace.lists() == number
        assert namespace.clock.now - begun < MIN_INTERVAL_SECONDS + 0.1
    assert namespace.clock.now - 1000 >= 2 * MIN_INTERVAL_SECONDS


def test_a_call_during_a_list_waits_for_the_next_list(namespace: Namespace) -> None:
    """The running LIST began before the call, so it may lack pods that were created since then."""
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(4)
    gate = Gate(namespace.api, "LIST")

    async def arrive() -> list[Decision]:
        deadline = namespace.clock.now + PATIENT
        first = asyncio.create_task(namespace.replica.ledgers.charge(asked("first", deadline=deadline)))
        assert await asyncio.to_thread(gate.arrived.wait, PATIENT)
        second = asyncio.create_task(namespace.replica.ledgers.charge(asked("second", deadline=deadline)))
        await asyncio.sleep(0)  # the sleep lets the second call run until it waits
        gate.opened.set()
        return [await first, await second]

    assert kinds(asyncio.run(arrive())) == ["Rejected", "Rejected"]
    assert namespace.lists() == 2


def test_a_list_that_takes_long_is_followed_by_a_rest(namespace: Namespace) -> None:
    """After a LIST, the next LIST waits four times as long as the LIST took. So LISTs run a fifth of the time."""
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(4)
    namespace.api.deliver = before("LIST", lambda: namespace.clock.pass_by(1), times=100)
    for _ in range(2):
        assert isinstance(namespace.charge(deadline=namespace.clock.now + 60), Rejected)
    assert namespace.clock.now == 1000 + 2 + 2 * REST_PER_SECOND + 2


def test_a_caller_past_its_deadline_must_not_retry_soon(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL})
    namespace.pods(4)
    gate = Gate(namespace.api, "LIST")
    late = namespace.charge(deadline=namespace.clock.now + 0.1)
    gate.opened.set()
    assert isinstance(late, PutOff)
    assert (late.soon, late.counted) == (False, False)


def test_a_failed_list_rejects_no_pod(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL})
    namespace.api.deliver = Script(lost_request, methods=("LIST",))
    with pytest.raises(Unavailable):
        namespace.charge()


def test_a_replica_with_an_older_quota_than_the_ledger_rejects_no_pod(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL}, config_version="70")
    namespace.pods(4)
    namespace.replica.store.resources = lambda: GpuResources(version="60")
    namespace.replica.store.nodes = lambda: nodes(**{"gpu-1": {MODEL: "M40"}})
    decision = namespace.charge()
    assert isinstance(decision, PutOff)
    assert not decision.counted


def test_a_replica_with_an_older_quota_than_the_ledger_admits_no_pod_of_a_model_without_nodes(
    namespace: Namespace,
) -> None:
    """The newer quota may not name the model. Then the ledger lacks the pods of the model."""
    namespace.ledger(config_version="70")
    namespace.pods(4)
    namespace.replica.store.resources = lambda: GpuResources(version="60")
    with pytest.raises(Unavailable, match="newer quota ConfigMap"):
        namespace.charge()


# Tests of a ledger that no leader recounts


def test_room_that_was_released_while_a_call_waited_is_used(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL})

    def recounted(method: str, _timeout: float, effect: Effect) -> bytes:
        listed = effect()
        if method == "LIST":
            namespace.api.deliver = delivered
            namespace.ledger(committed={"M40": CARD})
        return listed

    namespace.api.deliver = recounted
    assert isinstance(namespace.charge(), Admitted)


def test_without_a_controller_a_deleted_pod_is_released_when_it_can_no_longer_run(namespace: Namespace) -> None:
    """No watch has seen whether the pod ran, so the pod stays charged for the longest grace period."""
    namespace.ledger(
        committed={"M40": FULL}, pod_resource_version="90", terminating={"t": Terminating("P100", CARD, 9)}
    )
    namespace.pods(3)
    told = []
    for seconds in (0, SOON_SECONDS, RECOUNT_SECONDS - SOON_SECONDS - 1):
        namespace.clock.pass_by(seconds)
        decision = namespace.charge()
        assert isinstance(decision, PutOff)
        told.append(decision.soon)
    assert told == [True, False, False]
    namespace.clock.pass_by(2)
    assert isinstance(namespace.charge(), Admitted)
    ledger = namespace.replica.store.read("team-a").ledger
    assert (ledger.committed, list(ledger.pending), list(ledger.terminating)) == ({"M40": CARD + TWO}, ["asked"], ["t"])
    assert isinstance(namespace.charge("one more"), PutOff), "pending objects must still count"


def test_a_pod_deleted_after_the_count_stays_charged_for_its_own_time(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL}, pod_resource_version="90")
    namespace.pods(3)
    assert isinstance(namespace.charge(), PutOff)
    namespace.clock.pass_by(RECOUNT_SECONDS)
    namespace.pods(1)
    assert kinds(namespace.charge(uid) for uid in "ab") == ["Admitted", "PutOff"]
    namespace.clock.pass_by(RECOUNT_SECONDS)
    assert kinds(namespace.charge(uid) for uid in "bcd") == ["Admitted", "Admitted", "PutOff"]


def test_a_count_from_before_etcd_was_restored_recounts_nothing(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace.ledger(committed={"M40": FULL}, pod_resource_version="90")
    namespace.pods(3)
    assert isinstance(namespace.charge(), PutOff)
    namespace.clock.pass_by(RECOUNT_SECONDS)
    earlier = ObservedPods("95", {"M40": FULL}, (), since="95")
    monkeypatch.setattr(namespace.replica.store, "count_pods", lambda *_: earlier)
    assert isinstance(namespace.charge(), Rejected)
    assert namespace.replica.store.read("team-a").ledger.committed == {"M40": FULL}


def test_a_replica_that_has_not_counted_for_long_starts_over(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL}, pod_resource_version="90")
    namespace.pods(3)
    for seconds in (0, 3 * RECOUNT_SECONDS, RECOUNT_SECONDS - 1):
        namespace.clock.pass_by(seconds)
        assert isinstance(namespace.charge(), PutOff)
    namespace.clock.pass_by(2)
    assert isinstance(namespace.charge(), Admitted)


def test_an_older_count_does_not_recount_what_a_controller_recounted_since(namespace: Namespace) -> None:
    namespace.ledger(committed={"M40": FULL}, pod_resource_version="90")
    namespace.pods(3)
    assert isinstance(namespace.charge(), PutOff)
    namespace.pods(4)
    namespace.ledger(committed={"M40": FULL}, pod_resource_version="1000000")
    namespace.clock.pass_by(2 * RECOUNT_SECONDS)
    assert isinstance(namespace.charge(), Rejected)
