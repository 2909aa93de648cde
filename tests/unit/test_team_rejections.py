"""Tests of reservations and rejections in namespaces that share the quota of a team."""

import asyncio
import itertools
from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from tests.replicas import CARD, asked
from tests.tables import cases
from tests.team_members import SPEECH, VISION, Members, Recorder, quota, vision
from tests.waiting import PATIENT
from vcuda.errors import LedgerLost, ListOverdue, Unavailable
from vcuda.ledger.ledger import Admitted, Rejected
from vcuda.ledger.recount import ObservedPods
from vcuda.ledger.team import raised
from vcuda.placement.choice import Choice, Option, Rule, choose, shortages_of
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Team, Usage
from vcuda.quota.shortage import Shortage
from webhook.ledger.charging import Decision, PutOff


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def members(recorder: Recorder) -> Members:
    return Members(recorder)


# Tests of reservations


def busy(members: Members, shared: NamespaceQuota, number: int = 8) -> None:
    """Charge pods at a high rate, so that the replica reserves quota."""
    for _ in range(number):
        assert members.charge_all("team-a", quota=shared, created=0) == ["Admitted"]


def test_a_reservation_is_within_the_allotment(members: Members, recorder: Recorder) -> None:
    busy(members, vision(1000))
    reserved = members.ledger().reserved_of("M40").cores
    assert reserved > 0
    assert members.allotted()["team-a"] >= 800 + reserved
    members.check()
    recorder.named.clear()
    decisions = members.charge_all("team-a", quota=vision(1000), created=0)
    assert (decisions, recorder.named) == (["Admitted"], []), "admitted from the reservation"


def test_a_raise_under_load_allots_quota_for_later_charges_too(members: Members, recorder: Recorder) -> None:
    busy(members, vision(1000))
    recorder.named.clear()
    busy(members, vision(1000), 60)
    assert "PUT team.vision" not in recorder.named
    members.check()


def test_a_pod_that_is_admitted_while_the_ledger_of_the_team_is_read_stays_charged(
    members: Members, recorder: Recorder
) -> None:
    large = quota(Team("vision", {"M40": Limit(100_000), "P100": Limit(100_000)}))
    busy(members, large)
    members.clock.pass_by(1.5)  # the ledgers in memory are now too old
    ledgers, reads = members.replica.ledgers, itertools.count(1)
    given = {"quota": large, "counted_since": "7", "deadline": members.clock.now + PATIENT}

    at_once = recorder.deliver

    async def charge() -> Decision:
        loop = asyncio.get_running_loop()

        def deliver(method: str, _: object, effect: Callable[[], bytes]) -> bytes:
            if method == "GET" and next(reads) == len(("ledger", "ledger of the team")):
                spent = ledgers.charge(asked("spent", created=0, **given))
                assert isinstance(asyncio.run_coroutine_threadsafe(spent, loop).result(PATIENT), Admitted)
            return effect()

        recorder.deliver = deliver
        return await ledgers.charge(asked("other", model="P100", **given))

    assert isinstance(asyncio.run(charge()), Admitted)
    recorder.deliver = at_once
    asyncio.run(ledgers.flush())
    assert {"spent", "other"} <= members.ledger().pending.keys()


def test_a_closed_ledger_of_the_team_in_memory_allots_nothing(members: Members) -> None:
    members.charge("a")
    members.change_team(lambda team: replace(team, closed="restored-1"))
    asyncio.run(members.replica.ledgers.usage("team-a", VISION))
    with pytest.raises(LedgerLost):
        members.charge("b")


def test_no_quota_is_reserved_if_little_of_the_quota_of_the_team_is_free(members: Members) -> None:
    members.charge("a", quota=vision(1000))
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 975}))
    busy(members, vision(1000))
    assert members.ledger().reserved_of("M40") == Charge()
    assert members.allotted()["team-a"] == 900


def test_a_lower_limit_of_the_team_ends_a_reservation(members: Members) -> None:
    busy(members, vision(1000))
    assert members.ledger().reserved
    assert members.charge_all("team-a", quota=vision(8), counted_since="8", created=0) == ["PutOff"]


def test_a_charge_does_not_take_the_place_of_a_reservation_after_the_limit_was_lowered(members: Members) -> None:
    members.charge_all(*["team-b"] * 12, quota=vision(1000))
    busy(members, vision(1000))
    assert members.ledger().reserved
    assert members.charge_all("team-a", quota=vision(20), counted_since="8") == ["PutOff"]


def test_a_flush_writes_its_charges_after_the_namespace_has_moved_to_another_team(members: Members) -> None:
    busy(members, vision(1000))
    assert members.charge_all("team-a", quota=vision(1000), created=0) == ["Admitted"]
    moved = members.charge(
        "moved", by=members.other, quota=quota(Team("speech", vision(900).limits)), counted_since="8"
    )
    assert isinstance(moved, Admitted)
    before_ = members.ledger()
    for _ in range(2):  # the first write conflicts
        asyncio.run(members.replica.ledgers.flush())
    after = members.ledger()
    assert len(after.pending) > len(before_.pending)
    assert (after.allotments, after.reserved_of("M40")) == (before_.allotments, Charge())


# Tests of rejections


def test_a_charge_is_rejected_if_the_stored_pods_of_the_team_use_its_quota(members: Members) -> None:
    members.commit("team-a", 1)
    members.commit("team-b", 3)
    members.store_pods("team-a", 1)
    members.store_pods("team-b", 3)
    rejected = members.charge("x")
    assert isinstance(rejected, Rejected)
    assert rejected.shortage.sentence("team-a").startswith(
        "M40 in team vision, requested: 1 card, used: 4 (this namespace 1, others 3), limited: 4"
    )


@cases(
    "pods, outcome",
    all_are_stored=({"team-a": 1, "team-b": 3}, Rejected),
    a_pod_of_another_namespace_was_deleted=({"team-a": 1, "team-b": 2}, PutOff),
    an_own_pod_was_deleted=({"team-a": 0, "team-b": 3}, PutOff),
)
def test_only_stored_objects_of_the_team_cause_a_rejection(
    members: Members, pods: Mapping[str, int], outcome: type[Decision]
) -> None:
    members.commit("team-a", 1)
    members.commit("team-b", 3)
    for namespace, number in pods.items():
        members.store_pods(namespace, number)
    assert isinstance(members.charge("x"), outcome)


def test_unused_quota_of_another_namespace_is_asked_for_without_a_list_of_its_pods(
    members: Members, recorder: Recorder
) -> None:
    members.commit("team-a", 1)
    members.commit("team-b", 1)
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 3}))
    recorder.forget_calls()
    put_off = members.charge("x")
    assert isinstance(put_off, PutOff)
    assert (put_off.soon, recorder.calls.count("LIST")) == (True, 1)
    wanted = members.teams.read("vision").ledger.wanted
    assert wanted
    members.charge("y")
    assert members.teams.read("vision").ledger.wanted == wanted, "at most one mark a second"
    members.clock.pass_by(1.5)
    members.charge("z")
    assert members.teams.read("vision").ledger.wanted != wanted
    for _ in range(4):
        members.clock.pass_by(1)
        later = members.charge("z")
    assert isinstance(later, PutOff)
    assert not later.soon, "a longer shortage does not end soon"


def test_a_dry_run_asks_for_unused_quota_as_a_create_does(members: Members) -> None:
    """Otherwise it would fail as often as it is repeated, although a create would succeed."""
    members.commit("team-a", 1)
    members.commit("team-b", 1)
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 3}))
    assert isinstance(members.charge("x", dry_run=True), PutOff)
    assert members.teams.read("vision").ledger.wanted


def test_unused_quota_is_asked_for_although_the_ledger_of_another_namespace_is_damaged(
    members: Members, recorder: Recorder
) -> None:
    for name, number in {"team-a": 1, "team-b": 0, "team-c": 1}.items():
        members.commit(name, number)
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 2}))
    path = members.store.path("team-c")
    recorder.store(path, {**recorder.objects[path], "data": {"ledger": "{"}})
    assert isinstance(members.charge("x"), PutOff)
    assert members.teams.read("vision").ledger.wanted


def test_a_namespace_that_cannot_be_listed_is_judged_by_its_ledger(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.commit("team-a", 1)
    members.commit("team-b", 3)
    members.store_pods("team-a", 1)
    count = members.store.count_pods

    def counted(namespace: str, *args: object) -> ObservedPods:
        if namespace == "team-b":
            raise ListOverdue("too many pods")
        return count(namespace, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(members.store, "count_pods", counted)
    assert isinstance(members.charge("x"), Rejected)


def test_the_namespaces_of_a_team_are_counted_at_one_version(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    members.commit("team-a", 1)
    members.commit("team-b", 3)
    versions: dict[str, str] = {}
    count = members.store.count_pods

    def counted(namespace: str, timeout: float, exact: str = "") -> ObservedPods:
        versions[namespace] = exact
        return count(namespace, timeout, exact)

    monkeypatch.setattr(members.store, "count_pods", counted)
    members.charge("x")
    assert set(versions) == {"team-a", "team-b"}
    assert len({*versions.values()} - {""}) == 1


def test_counting_ends_when_the_quota_of_the_team_is_used(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    for namespace, number in {"team-a": 0, "team-b": 4, **{f"team-{each}": 1 for each in range(40)}}.items():
        members.commit(namespace, number)
    members.store_pods("team-b", 4)
    listed: list[str] = []
    count = members.store.count_pods

    def counted(namespace: str, *args: object) -> ObservedPods:
        listed.append(namespace)
        return count(namespace, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(members.store, "count_pods", counted)
    assert isinstance(members.charge("x"), Rejected)
    assert listed[0] == "team-b"
    assert len(listed) < 10


# Tests of the usage that /mutate sees


def test_the_usage_of_a_member_includes_what_other_namespaces_may_use(members: Members) -> None:
    members.charge_all("team-a", "team-b", "team-b")
    usage = asyncio.run(members.replica.ledgers.usage("team-a", VISION))
    assert (usage["M40"].used, usage["M40"].others) == (CARD, CARD * 2)


@cases(
    "used, listed",
    only_unused_quota_is_missing=(1, ["team-a"]),
    the_ledgers_leave_no_room=(3, ["team-a", "team-a", "team-b"]),
)
def test_other_namespaces_are_listed_for_a_choice_only_if_their_ledgers_leave_no_room(
    members: Members, monkeypatch: pytest.MonkeyPatch, used: int, listed: list[str]
) -> None:
    """A LIST of many namespaces may take longer than the review. /validate asks for unused quota."""
    members.commit("team-a", 0)
    members.commit("team-b", used)
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 3}))
    counted, count = list[str](), members.store.count_pods

    def counting(namespace: str, *args: object) -> ObservedPods:
        counted.append(namespace)
        return count(namespace, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(members.store, "count_pods", counting)
    ledgers = members.replica.ledgers
    usage = asyncio.run(ledgers.usage("team-a", VISION))
    own = NamespaceQuota({"M40": Limit(400)}, team=VISION)
    options = [Option("M40", CARD * 2, own, usage["M40"])]
    stored = asyncio.run(ledgers.stored_usage("team-a", shortages_of(options), usage, members.clock.now + PATIENT))
    assert stored is not None
    assert (stored["M40"].others, sorted(counted)) == (CARD if used == 1 else Charge(), listed)


@cases("team, others", new=(SPEECH, CARD), none=(None, Charge()))
def test_the_usage_of_a_namespace_that_moves_has_the_usage_of_the_team_in_the_reviewed_quota(
    members: Members, team: Team | None, others: Charge
) -> None:
    """The ledger of the namespace still names its former team."""
    members.charge_all("team-a", "team-b", "team-b")
    members.charge_all("team-c", quota=quota(SPEECH))
    members.store_pods("team-c", 1)
    ledgers = members.replica.ledgers
    cached, usage = asyncio.run(ledgers.cached_usage("team-a", team)), asyncio.run(ledgers.usage("team-a", team))
    short = [Shortage("M40", CARD * 4, usage["M40"], Limit(400), team=team.name)] if team else []
    stored = asyncio.run(ledgers.stored_usage("team-a", short, usage, members.clock.now + PATIENT))
    assert [each.get("M40", Usage()).others for each in (cached, usage, stored or usage)] == [others] * 3


def test_the_usage_in_memory_costs_no_calls(members: Members, recorder: Recorder) -> None:
    members.charge_all("team-b", "team-b", "team-a")
    recorder.forget_calls()
    usage = asyncio.run(members.replica.ledgers.cached_usage("team-a", VISION))
    assert (usage["M40"].others, recorder.calls) == (CARD * 2, [])


def test_the_model_with_room_in_the_team_is_chosen() -> None:
    full = Usage(CARD, others=CARD * 3)
    usages = {"M40": full, "P100": Usage()}
    own = NamespaceQuota(dict.fromkeys(usages, Limit(400)), team=VISION)
    options = [Option(model, CARD, own, usage) for model, usage in usages.items()]
    choice = choose(options, Rule.DOCUMENT)
    assert isinstance(choice, Choice)
    assert choice.model == "P100"
    [shortage] = shortages_of(options)
    assert (shortage.team, shortage.others) == ("vision", CARD * 3)


def test_outdated_allotments_are_read_again_by_one_call_for_all_reviews(members: Members, recorder: Recorder) -> None:
    members.charge_all("team-b", "team-a")
    members.clock.pass_by(60)
    recorder.named.clear()

    async def usages() -> None:
        await asyncio.gather(*(members.replica.ledgers.cached_usage("team-a", VISION) for _ in range(8)))

    asyncio.run(usages())
    assert recorder.named.count("GET team.vision") == 1


def test_a_model_is_chosen_although_the_ledger_of_the_team_cannot_be_read(members: Members, recorder: Recorder) -> None:
    members.charge_all("team-b", "team-a")
    members.clock.pass_by(60)

    def deliver(_method: str, _timeout: float, effect: Callable[[], bytes]) -> bytes:
        if recorder.named[-1] == "GET team.vision":
            raise Unavailable("timed out")
        return effect()

    recorder.deliver = deliver
    usage = asyncio.run(members.replica.ledgers.cached_usage("team-a", VISION))
    assert usage["M40"].others == CARD


def test_an_admission_within_the_allotment_has_the_usage_of_the_team_for_its_warning(members: Members) -> None:
    shared = quota(replace(VISION, total=Limit(400)))
    members.charge_all("team-a", "team-b", quota=shared)
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 3}))
    members.charge("a", quota=shared)
    admitted = members.charge("b", quota=shared)
    assert isinstance(admitted, Admitted)
    assert admitted.total_usage
    assert (admitted.usage.others, admitted.total_usage.others) == (CARD, CARD)
