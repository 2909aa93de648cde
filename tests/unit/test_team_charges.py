"""Tests of charges in namespaces that share the quota of a team."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api_double import Script, before, delivered, lost_reply, lost_request
from tests.replicas import CARD, asked, kinds, together
from tests.tables import cases
from tests.team_members import SPEECH, VISION, Members, Recorder, quota, vision
from tests.waiting import PATIENT
from vcuda.errors import Conflict, LedgerLost, Unavailable
from vcuda.kube import TeamMap
from vcuda.ledger import team as team_rules
from vcuda.ledger.ledger import Admitted, Allotment, Ledger, Rejected
from vcuda.ledger.team import lowered, raised, shrunk
from vcuda.quota.model import Limit, Mode, NamespaceQuota, Team
from vcuda.quota.shortage import read_shortages
from webhook.ledger.charging import PutOff, RetryLater


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def members(recorder: Recorder) -> Members:
    return Members(recorder)


# Tests of the shared quota


def test_the_namespaces_of_a_team_share_its_quota(members: Members) -> None:
    assert members.charge_all("team-a", "team-b", "team-c", "team-a") == ["Admitted"] * 4
    assert members.allotted() == {"team-a": 200, "team-b": 100, "team-c": 100}
    put_off = members.charge("x", "team-b")
    assert isinstance(put_off, PutOff)
    [shortage] = put_off.shortages
    figures = "requested: 1 card, used: 4 (this namespace 1, others 3), limited: 4, 1 more needed"
    assert shortage.sentence("team-b") == f"M40 in team vision, {figures}"
    [missing] = read_shortages(f"exceeded quota: {shortage.sentence('team-b')}")
    assert (missing.model, missing.needed) == ("M40", 1)
    members.check()


def test_two_replicas_fill_the_quota_of_a_team_exactly(members: Members) -> None:
    names = ["team-a", "team-b"] * 4
    by = [members.replica, members.other, members.other, members.replica] * 2
    decisions = [members.charge(f"{at}", name, by[at]) for at, name in enumerate(names)]
    assert kinds(decisions) == ["Admitted"] * 4 + ["PutOff"] * 4
    assert members.allotted() == {"team-a": 200, "team-b": 200}


def test_the_limits_of_a_namespace_hold_within_its_team(members: Members) -> None:
    own = quota(limits={"M40": Limit(100)}, total=Limit(100))
    assert members.charge_all("team-a", "team-a", quota=own) == ["Admitted", "PutOff"]
    put_off = members.charge("x", quota=own)
    assert isinstance(put_off, PutOff)
    assert "M40 in namespace team-a" in put_off.shortages[0].sentence("team-a")


def test_the_total_of_a_team_holds_for_all_models_and_namespaces(members: Members) -> None:
    shared = quota(replace(VISION, total=Limit(300)))
    assert members.charge_all("team-a", "team-b", quota=shared) == ["Admitted"] * 2
    assert members.charge_all("team-a", "team-b", quota=shared, model="P100")[0] == "Admitted"
    put_off = members.charge("x", "team-c", quota=shared)
    assert isinstance(put_off, PutOff)
    assert put_off.shortages[0].sentence("team-c") == (
        "total in team vision, requested: 1 card, used: 3 (this namespace 0, others 3), limited: 3, 1 more needed"
    )


def test_a_request_larger_than_the_limit_of_the_team_is_rejected_without_a_list(
    members: Members, recorder: Recorder
) -> None:
    members.charge("a")
    recorder.forget_calls()
    decision = members.charge("b", charge=CARD * 5)
    assert isinstance(decision, Rejected)
    assert "LIST" not in recorder.calls


def test_a_quota_that_only_warns_admits_beyond_the_limits_of_the_team(members: Members) -> None:
    """The charges count all the same, so that a namespace whose limits are enforced finds no free quota."""
    warns = quota(mode=Mode.WARN)
    decisions = [members.charge(f"{number}", quota=warns) for number in range(5)]
    assert kinds(decisions) == ["Admitted"] * 5
    assert [bool(each.shortage) for each in decisions if isinstance(each, Admitted)] == [False] * 4 + [True]
    assert members.allotted() == {"team-a": 500}
    assert isinstance(members.charge("x", "team-b"), PutOff)


def test_only_a_bounded_number_of_namespaces_use_the_quota_of_a_team(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_rules, "MAX_MEMBERS", 2)
    assert members.charge_all("team-a", "team-b") == ["Admitted"] * 2
    rejected = members.charge("x", "team-c")
    assert rejected == RetryLater("at most 2 namespaces of team vision can use its quota at once")
    assert members.charge_all("team-a") == ["Admitted"]
    assert members.charge_all("team-c", "team-c", quota=quota(mode=Mode.WARN)) == ["Admitted"] * 2, "it only warns"
    assert set(members.allotted()) == {"team-a", "team-b"}


# Tests of the reads and writes


def test_the_ledger_of_the_namespace_is_read_before_and_written_after_the_ledger_of_the_team(
    members: Members, recorder: Recorder
) -> None:
    members.charge("a")
    members.clock.pass_by(60)
    recorder.named.clear()
    assert isinstance(members.charge("b"), Admitted)
    assert recorder.named == ["GET team-a", "GET team.vision", "PUT team.vision", "PUT team-a"]


def test_a_namespace_is_named_by_its_ledger_before_its_allotment_is_raised(
    members: Members, recorder: Recorder
) -> None:
    members.teams.open("vision")
    recorder.named.clear()
    members.charge("a")
    assert recorder.named == ["GET team-a", "PUT team-a", "GET team.vision", "PUT team.vision", "PUT team-a"]


def test_a_charge_within_the_allotment_costs_one_write(members: Members, recorder: Recorder) -> None:
    members.charge("a")
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 3}))
    members.charge("b")
    recorder.named.clear()
    assert members.charge_all("team-a") == ["Admitted"]
    assert recorder.named == ["PUT team-a"]
    members.check()


def test_a_raise_from_memory_costs_two_writes(members: Members, recorder: Recorder) -> None:
    members.charge("a")
    recorder.named.clear()
    members.charge("b", "team-b")
    recorder.named.clear()
    members.charge("c")
    assert recorder.named == ["PUT team.vision", "PUT team-a"]


def test_an_outdated_memory_of_the_ledger_of_the_team_admits_nothing(members: Members) -> None:
    members.charge("a")
    members.charge_all("team-b", "team-b", "team-b", by=members.other)
    assert isinstance(members.charge("b"), PutOff)
    assert members.allotted() == {"team-a": 100, "team-b": 300}


def test_a_rejection_by_the_limits_of_the_team_is_decided_by_newly_read_ledgers(members: Members) -> None:
    assert members.charge_all("team-a", "team-b", "team-b", "team-b") == ["Admitted"] * 4
    members.change_ledger(lambda ledger: replace(ledger, pending={}), "team-b")
    members.change_team(lambda team: lowered(team, "team-b", {}))
    assert isinstance(members.charge("x"), Admitted)


@cases(
    "name, times",
    the_ledger_of_the_team=("team.vision", 1),
    the_ledger_of_the_namespace=("team-a", 1),
    the_ledger_of_the_team_twice=("team.vision", 2),
    the_ledger_of_the_namespace_twice=("team-a", 2),
)
@pytest.mark.parametrize("delivery", [lost_request, lost_reply])
def test_a_write_without_an_answer_is_decided_again(
    members: Members, recorder: Recorder, name: str, times: int, delivery: Any
) -> None:
    members.charge("a")
    left = [times]

    def deliver(method: str, timeout: float, effect: Callable[[], bytes]) -> bytes:
        if method == "PUT" and recorder.named[-1] == f"PUT {name}" and left[0]:
            left[0] -= 1
            return bytes(delivery(method, timeout, effect))
        return effect()

    recorder.deliver = deliver
    assert isinstance(members.charge("b"), Admitted)
    assert left < [times]
    recorder.deliver = delivered
    assert members.allotted() == {"team-a": 200}
    members.check()


def test_a_replica_that_ends_between_the_two_writes_leaves_only_an_unused_allotment(
    members: Members, recorder: Recorder
) -> None:
    members.charge("a")
    members.charge("b", "team-b")
    recorder.deliver = Script(delivered, *[lost_request] * 500, methods=("PUT",))
    assert isinstance(members.charge("c", deadline=members.clock.now + 0.5), RetryLater)
    recorder.deliver = delivered
    assert (members.allotted(), len(members.ledger().pending)) == ({"team-a": 200, "team-b": 100}, 1)
    assert members.charge_all("team-a", "team-b", "team-a", by=members.other) == ["Admitted", "Admitted", "PutOff"]
    members.check()


def changed_ledger(members: Members) -> None:
    members.change_ledger(lambda ledger: replace(ledger, waiting=ledger.waiting + "x"))


def changed_team(members: Members) -> None:
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD}))


def taken_back(members: Members) -> None:
    """Act as the leader: take back the unused quota of the namespace."""
    team = members.teams.open("vision")
    stored = members.store.open("team-a")
    members.store.write("team-a", shrunk(stored.ledger, "vision"), stored)
    members.teams.write("vision", lowered(team.ledger, "team-a", team_rules.needed(stored.ledger)), team)


@pytest.mark.parametrize("act", [changed_ledger, changed_team, taken_back])
@pytest.mark.parametrize("at", [1, 2])
def test_a_conflict_at_either_write_is_decided_again(
    members: Members, recorder: Recorder, act: Callable[[Members], None], at: int
) -> None:
    members.charge("a")
    other = Members(recorder)

    def acted() -> None:
        recorder.deliver, deliver = delivered, recorder.deliver
        act(other)
        recorder.deliver = deliver

    recorder.deliver = Script(*[delivered] * (at - 1), before("PUT", acted), methods=("PUT",))
    assert isinstance(members.charge("b"), Admitted)
    recorder.deliver = delivered
    assert members.allotted()["team-a"] == 200
    members.check()


@pytest.mark.parametrize("step", [1, 2, 3])
def test_no_quota_is_used_that_is_taken_back_at_the_same_time(members: Members, step: int) -> None:
    """The leader's steps: read the ledger of the team, write the ledger of the namespace, write the team's ledger."""
    members.charge("a")
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 3}))
    members.charge("b")
    team = members.teams.open("vision")
    if step == 1:
        members.charge("c")
    stored = members.store.open("team-a")
    members.store.write("team-a", shrunk(stored.ledger, "vision"), stored)
    if step == 2:
        members.charge("c")
    with pytest.raises(Conflict) if step == 2 else contextlib.nullcontext():
        members.teams.write("vision", lowered(team.ledger, "team-a", team_rules.needed(stored.ledger)), team)
    if step == 3:
        members.charge("c")
    members.check()
    assert len(members.ledger().pending) == 3


# Tests of joins, moves and edits


def test_a_namespace_that_changes_teams_counts_in_both_until_the_new_team_allots_its_charges(
    members: Members, recorder: Recorder
) -> None:
    members.charge("a")
    recorder.named.clear()
    assert isinstance(members.charge("b", quota=quota(SPEECH), counted_since="8"), Admitted)
    assert (members.allotted(), members.allotted(team="speech")) == ({"team-a": 100}, {"team-a": 200})
    ledger = members.ledger()
    assert (set(ledger.allotments), ledger.team_version) == ({"speech"}, "8")


def test_a_namespace_joins_a_team_with_its_charges(members: Members) -> None:
    assert members.charge_all("team-a", "team-a", "team-a", quota=quota(None)) == ["Admitted"] * 3
    assert members.ledger().allotments == {}
    assert members.charge_all("team-b", "team-a", counted_since="8") == ["Admitted", "PutOff"]
    assert members.charge_all("team-b", counted_since="8") == ["Admitted"], (
        "the leader counts the charges with which a namespace joins"
    )


def test_a_namespace_leaves_its_team(members: Members) -> None:
    members.charge("a")
    assert isinstance(members.charge("b", quota=quota(None), counted_since="8"), Admitted)
    assert (members.ledger().allotments, members.ledger().team_version) == ({}, "8")


@cases("of", another_team=quota(SPEECH), no_team=quota(None))
def test_an_older_quota_document_does_not_change_the_team_of_a_namespace(members: Members, of: NamespaceQuota) -> None:
    members.charge("a", counted_since="8")
    before_ = members.ledger()
    with pytest.raises(Unavailable, match="newer quota ConfigMap"):
        members.charge("b", by=members.other, quota=of, counted_since="7")
    assert members.ledger() == before_


def test_charges_of_one_batch_are_decided_by_the_newest_quota_document(members: Members, recorder: Recorder) -> None:
    """A review that began before an edit is charged together with later reviews."""
    members.charge_all("team-b", "team-b", "team-b", counted_since="8")
    deadline = members.clock.now + PATIENT
    old = asked("old", quota=quota(None), counted_since="7", deadline=deadline)
    new = asked("new", quota=quota(), counted_since="8", deadline=deadline)
    first = asked("first", quota=quota(), counted_since="8", deadline=deadline, dry_run=True)
    with pytest.raises(Unavailable):  # the older document must be read again
        together(recorder, members.replica, first, [new, old])
    assert members.ledger().pending.keys() == {"new"}


def test_an_older_quota_document_raises_no_allotment(members: Members) -> None:
    members.charge("a", counted_since="7")
    members.charge("b", "team-b", counted_since="8")
    with pytest.raises(Unavailable, match="newer quota ConfigMap"):
        members.charge("c", by=members.other, counted_since="7")


def test_an_unused_allotment_is_not_used_beyond_a_lower_limit(members: Members) -> None:
    members.charge("a", quota=vision(8))
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 6}))
    members.charge("b", quota=vision(8))
    members.charge("c", "team-b", quota=vision(8))
    assert members.charge_all("team-a", "team-a", quota=vision(4), counted_since="8") == ["Admitted", "PutOff"]
    assert members.ledger().allotments["vision"].charges == {"M40": CARD * 3}


def test_limits_that_hold_again_do_not_make_an_earlier_allotment_valid(members: Members) -> None:
    """While other limits held, other namespaces may have used the quota of an unused allotment."""
    small, large = vision(4), quota(Team("vision", {"M40": Limit(800)}, until=60.0))
    members.charge("a", quota=small)
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 4}))
    members.charge("b", quota=small)
    assert members.charge_all("team-b", "team-b", "team-b", quota=large) == ["Admitted"] * 3
    later = quota(Team("vision", {"M40": Limit(400)}, until=120.0))
    assert isinstance(members.charge("c", quota=later), PutOff)


def test_a_namespace_may_use_a_model_while_another_model_of_its_team_is_over_its_limit(members: Members) -> None:
    members.charge("a")
    members.change_team(lambda team: raised(team, "team-b", {"M40": CARD * 9}))
    assert members.charge_all("team-a", "team-a", model="P100") == ["Admitted"] * 2
    assert "M40" not in members.ledger().allotments["vision"].charges
    assert isinstance(members.charge("b"), PutOff)


# Tests of closed ledgers


def test_a_lost_ledger_of_the_team_is_opened_by_the_next_raise(members: Members, recorder: Recorder) -> None:
    assert members.charge_all("team-a", "team-b", "team-b") == ["Admitted"] * 3
    recorder.remove(next(path for path in recorder.objects if path.endswith("team.vision")))
    assert members.charge_all("team-a", "team-a") == ["Admitted", "PutOff"]
    assert members.allotted() == {"team-a": 200, "team-b": 200}
    members.check()


def test_a_restored_ledger_of_the_team_admits_nothing_beyond_the_allotments(members: Members) -> None:
    members.charge("a")
    members.change_team(lambda team: raised(team, "team-a", {"M40": CARD * 3}))
    members.charge("b")
    members.change_team(lambda team: replace(team, closed="restored-1"))
    assert isinstance(members.charge("c"), Admitted)
    members.clock.pass_by(2)
    with pytest.raises(LedgerLost, match="team vision"):
        members.charge("d")


def test_a_team_that_gets_its_name_back_counts_its_namespaces_before_it_admits(members: Members) -> None:
    """The ledger under this name was emptied, but is not deleted yet. This replica has it in memory."""
    members.replica.ledgers.team_map = lambda: TeamMap(lambda _: "vision", version)
    version = "7"
    members.charge_all("team-a", "team-b")
    moved = {"speech": Allotment({"M40": CARD * 4})}
    for name, used in (("team-a", {}), ("team-b", {"M40": CARD * 4})):
        left = Ledger(used, members.api.version, allotments=moved, team_version="8")
        members.change_ledger(lambda _, left=left: left, name)  # type: ignore[misc]
    members.change_team(lambda team: replace(team, allotted={}, config_version="8"))
    version = "9"
    assert members.charge_all("team-a", counted_since="9") == ["PutOff"]
