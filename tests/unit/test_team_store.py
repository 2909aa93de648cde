"""Tests of the store of the ledgers of teams: how they are opened, and what happens if they are lost."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from tests.api_double import ApiDouble, before, lost_reply
from tests.builders import ONE_CARD, stored_pod
from tests.replicas import CARD, Clock, Replica
from vcuda.errors import Conflict, LedgerLost, Unavailable, UnreadableLedger, WriteUnanswered
from vcuda.kube import LedgerStore, TeamMap, TeamStore
from vcuda.kube.team_store import RESTORED
from vcuda.ledger.ledger import LOST, Allotment, Ledger, Reservation
from vcuda.ledger.team import TeamLedger, lowered, raised
from vcuda.quota.model import Charge

TEAM = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-team.vision"
ALLOTTED = {"A100": Charge(300)}
USED = {"A100": Charge(200)}
NOTHING: Mapping[str, Charge] = {}


@pytest.fixture
def ledgers(api: ApiDouble, clock: Clock) -> LedgerStore:
    return Replica(api, clock).store


@pytest.fixture
def teams(ledgers: LedgerStore) -> TeamStore:
    return TeamStore(ledgers)


def member(
    ledgers: LedgerStore, used: Mapping[str, Charge] = NOTHING, namespace: str = "team-a", **allotments: Allotment
) -> None:
    """Store the ledger of a namespace that has these charges and allotments."""
    stored = ledgers.open(namespace)
    ledgers.write(namespace, Ledger(used, allotments=allotments), stored)


def store_pod(api: ApiDouble) -> None:
    """Store a pod with one card in namespace team-a."""
    api.store("/api/v1/namespaces/team-a/pods/runs", stored_pod(ONE_CARD, uid="runs"))


def test_the_first_ledger_of_a_team_is_created_closed_and_opened_by_a_later_write(
    api: ApiDouble, teams: TeamStore
) -> None:
    assert teams.read("vision").version is None
    api.forget_calls()
    opened = teams.open("vision")
    assert (opened.ledger, api.calls) == (TeamLedger(), ["GET", "POST", "GET", "LIST", "PUT"])
    assert teams.read("vision") == opened
    api.forget_calls()
    assert teams.open("vision") == opened
    assert api.calls == ["GET"]


def test_a_lost_ledger_of_a_team_gets_what_its_namespaces_need(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    member(ledgers, USED, vision=Allotment(ALLOTTED, "terms", 4))
    member(ledgers, USED, "team-b", speech=Allotment(ALLOTTED))
    member(ledgers, USED, "team-c", vision=Allotment())
    assert teams.open("vision").ledger == TeamLedger({"team-a": USED, "team-c": USED})
    assert ledgers.read("team-a").ledger.allotments == {"vision": Allotment(USED, counter=5)}, "unused quota is free"
    assert ledgers.read("team-c").ledger.allotments == {"vision": Allotment(counter=1)}
    assert ledgers.read("team-b").ledger.allotments == {"speech": Allotment(ALLOTTED)}, "of another team"
    version, members = teams.members("vision")
    assert (version, [*members]) == (api.version, ["team-a", "team-c"])


def test_a_raise_that_began_before_the_ledger_of_the_team_was_lost_fails(
    teams: TeamStore, ledgers: LedgerStore
) -> None:
    member(ledgers, vision=Allotment())
    raising = ledgers.open("team-a")
    teams.open("vision")
    with pytest.raises(Conflict):
        ledgers.write("team-a", Ledger(), raising)


@pytest.mark.parametrize("times", [1, 3])
def test_a_ledger_that_changes_while_the_ledger_of_its_team_is_opened_is_read_again(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore, times: int
) -> None:
    member(ledgers, vision=Allotment())

    def change() -> None:
        api.deliver, deliver = lambda _method, _timeout, effect: effect(), api.deliver
        member(ledgers, USED, vision=Allotment(ALLOTTED))
        api.deliver = deliver

    api.deliver = before("PUT", change, times)
    assert teams.open("vision").ledger.allotted == {"team-a": USED}


def test_a_namespace_whose_ledger_is_lost_keeps_its_allotment(teams: TeamStore, ledgers: LedgerStore) -> None:
    """The new ledger lacks the charges of pods that are not stored yet."""
    opened = teams.open("vision")
    written = raised(raised(opened.ledger, "team-a", ALLOTTED), "team-b", ALLOTTED)
    teams.write("vision", replace(written, closed="again"), opened)
    member(ledgers, vision=Allotment(ALLOTTED))
    closed = Ledger(allotments={"vision": Allotment()}, reserved={LOST: Reservation({}, 1)})
    ledgers.write("team-a", closed, ledgers.open("team-a"))
    assert teams.open("vision").ledger.allotted == {"team-a": ALLOTTED, "team-b": ALLOTTED}


def test_the_ledger_of_a_team_is_not_opened_before_a_lost_ledger_of_its_namespaces(
    teams: TeamStore, ledgers: LedgerStore, clock: Clock
) -> None:
    closed = Ledger(allotments={"vision": Allotment()}, reserved={LOST: Reservation({}, 1)})
    ledgers.write("team-a", closed, ledgers.open("team-a"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="the ledger of a namespace of team vision has not been counted yet"):
            teams.open("vision")
    with pytest.raises(LedgerLost):
        ledgers.open("team-a")
    clock.pass_by(ledgers.uncertain_seconds)
    member(ledgers, USED, vision=Allotment())
    assert teams.open("vision").ledger.allotted == {"team-a": USED}


def test_a_ledger_that_is_lost_while_the_ledger_of_its_team_is_opened_is_counted(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore, clock: Clock
) -> None:
    member(ledgers, USED, vision=Allotment(ALLOTTED))
    store_pod(api)
    api.deliver = before("PUT", lambda: api.remove(ledgers.path("team-a")))
    for _ in range(2):
        with pytest.raises(Unavailable, match="has not been counted yet"):
            teams.open("vision", PLACED)
    clock.pass_by(ledgers.uncertain_seconds)
    assert teams.open("vision", PLACED).ledger.allotted == {"team-a": {"M40": CARD}}


def test_a_ledger_that_is_deleted_while_the_ledger_of_its_team_is_opened_has_no_allotment(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    member(ledgers, vision=Allotment(ALLOTTED))
    api.deliver = before("PUT", lambda: ledgers.drop("team-a", ledgers.open("team-a").version or ""))
    with pytest.raises(Unavailable):
        teams.open("vision", PLACED)
    assert teams.open("vision", PLACED).ledger.allotted == {}


def test_only_one_of_two_processes_opens_a_ledger(api: ApiDouble, teams: TeamStore, ledgers: LedgerStore) -> None:
    api.deliver = before("PUT", lambda: TeamStore(ledgers).open("vision"))
    with pytest.raises(Conflict):
        teams.open("vision")
    assert not teams.read("vision").ledger.closed


def test_a_write_replaces_only_the_version_that_was_read(teams: TeamStore) -> None:
    opened = teams.open("vision")
    written = teams.write("vision", raised(opened.ledger, "team-a", ALLOTTED, "7"), opened)
    assert teams.read("vision") == written
    with pytest.raises(Conflict):
        teams.write("vision", lowered(opened.ledger, "team-a", {}), opened)


def test_a_write_without_an_answer_is_reported(api: ApiDouble, teams: TeamStore) -> None:
    opened = teams.open("vision")
    api.deliver = lost_reply
    with pytest.raises(WriteUnanswered):
        teams.write("vision", opened.ledger, opened)


def test_a_deleted_ledger_is_a_conflict_for_its_writer(api: ApiDouble, teams: TeamStore) -> None:
    opened = teams.open("vision")
    teams.delete("vision", str(opened.version))
    assert TEAM not in api.objects
    with pytest.raises(Conflict):
        teams.write("vision", opened.ledger, opened)


def test_a_restored_ledger_of_a_team_is_closed_until_all_pods_are_stored(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore, clock: Clock
) -> None:
    """After a restore of etcd from a backup, the ledgers may lack the charges of pods that are not stored yet."""
    opened = teams.open("vision")
    restore = api.backup()
    teams.write("vision", raised(opened.ledger, "team-a", ALLOTTED, "7"), opened)
    restore()
    assert teams.read("vision").ledger.closed.startswith(RESTORED)
    fresh = TeamStore(ledgers)
    for each in (teams, fresh):
        with pytest.raises(LedgerLost, match="the ledger of team vision was lost"):
            each.open("vision")
    clock.pass_by(ledgers.uncertain_seconds)
    assert fresh.open("vision").ledger == TeamLedger()


def test_a_team_ledger_that_is_created_at_an_older_version_is_closed(api: ApiDouble, teams: TeamStore) -> None:
    restore = api.backup()
    opened = teams.open("vision")
    teams.write("vision", opened.ledger, opened)
    restore()
    with pytest.raises(LedgerLost):
        teams.open("vision")


def test_a_damaged_ledger_of_a_team_is_named(api: ApiDouble, teams: TeamStore) -> None:
    teams.open("vision")
    api.store(TEAM, {**api.objects[TEAM], "data": {"ledger": "{"}})
    with pytest.raises(UnreadableLedger, match=r"gpu-ledger-team\.vision cannot be read"):
        teams.read("vision")


def test_a_watch_delivers_the_ledgers_of_teams(teams: TeamStore, ledgers: LedgerStore) -> None:
    member(ledgers)
    opened, changed = teams.open("vision"), list[str]()
    reflector = teams.reflector(changed.append)
    reflector.relist()
    (named,) = reflector.snapshot().values()
    assert (named.team, named.read(), changed) == ("vision", opened, ["vision"])
    assert [*reflector.snapshot()] == [teams.key("vision")]


# Tests of ledgers that are lost together

PLACED = TeamMap({"team-a": "vision", "team-b": "speech"}.get, "8")


def test_a_lost_ledger_of_a_team_includes_the_charges_of_ledgers_that_do_not_name_the_team_any_more(
    teams: TeamStore, ledgers: LedgerStore
) -> None:
    """The ledger of the namespace was lost too, and was opened again."""
    member(ledgers, USED)
    member(ledgers, USED, "team-b")
    assert teams.open("vision", PLACED).ledger.allotted == {"team-a": USED}
    found = ledgers.read("team-a").ledger
    assert (found.allotments, found.team_version) == ({"vision": Allotment(counter=1)}, "8")
    assert ledgers.read("team-b").ledger.allotments == {}


def test_a_namespace_without_charges_takes_no_place_when_the_ledger_is_opened(
    teams: TeamStore, ledgers: LedgerStore
) -> None:
    member(ledgers, vision=Allotment())
    member(ledgers, namespace="team-b")
    assert teams.open("vision", TeamMap(lambda _: "vision", "8")).ledger.allotted == {}


def test_a_lost_ledger_of_a_team_is_not_opened_while_a_ledger_of_its_namespaces_is_missing(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore, clock: Clock
) -> None:
    member(ledgers, USED)
    store_pod(api)
    api.remove(ledgers.path("team-a"))
    for _ in range(2):
        with pytest.raises(Unavailable, match="the ledger of a namespace of team vision has not been counted yet"):
            teams.open("vision", PLACED)
    assert TeamStore(ledgers).open("speech", PLACED).ledger.allotted == {}
    clock.pass_by(ledgers.uncertain_seconds)
    assert teams.open("vision", PLACED).ledger.allotted == {"team-a": {"M40": CARD}}


def test_the_waits_for_all_lost_ledgers_of_a_team_begin_together(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore, clock: Clock
) -> None:
    everywhere, names = TeamMap(lambda _: "vision", "8"), [f"team-{number}" for number in range(30)]
    for name in names:
        member(ledgers, namespace=name)
        api.remove(ledgers.path(name))
    before_ = clock.now
    with pytest.raises(Unavailable):
        teams.open("vision", everywhere)
    assert clock.now < before_ + 1, "a call of the webhook must not wait for each of them"
    clock.pass_by(ledgers.uncertain_seconds)
    assert teams.open("vision", everywhere).ledger.allotted == {}


def test_the_charges_of_new_namespaces_are_counted_before_a_newer_quota_opens_the_ledger_of_their_team(
    teams: TeamStore, ledgers: LedgerStore
) -> None:
    """The team may have had another name before the edit, and its ledger may be empty."""
    opened = teams.open("vision", TeamMap({"team-b": "vision"}.get, "7"))
    teams.write("vision", raised(opened.ledger, "team-b", ALLOTTED, "7"), opened)
    member(ledgers, NOTHING, "team-b", vision=Allotment(ALLOTTED, "terms"))
    member(ledgers, USED, speech=Allotment(USED))
    assert teams.open("vision", TeamMap(lambda _: "vision", "8")).ledger.allotted == {"team-a": USED}
    assert [*ledgers.read("team-a").ledger.allotments] == ["speech", "vision"]
    unused = ledgers.read("team-b").ledger.allotments["vision"]
    assert (unused.charges, unused.terms) == ({}, ""), "the team may be over its limit now"


def test_an_edit_that_brings_no_charges_changes_no_allotment_of_the_team(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    opened = teams.open("vision")
    written = teams.write("vision", raised(opened.ledger, "team-b", ALLOTTED, "7"), opened)
    member(ledgers, NOTHING, "team-b", vision=Allotment(ALLOTTED, "terms"))
    member(ledgers)
    everywhere = TeamMap(lambda _: "vision", "8")
    assert teams.open("vision", everywhere).ledger == replace(written.ledger, config_version="8")
    assert ledgers.read("team-b").ledger.allotments == {"vision": Allotment(ALLOTTED, "terms")}
    api.forget_calls()
    teams.open("vision", everywhere)
    assert api.calls == ["GET"], "once for each edit"


def test_a_damaged_ledger_does_not_stop_its_team_after_an_edit(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    teams.open("vision")
    for name, allotments in (("team-a", {"vision": Allotment()}), ("team-b", {})):
        member(ledgers, USED, name, **allotments)
        api.store(ledgers.path(name), {**api.objects[ledgers.path(name)], "data": {"ledger": "{"}})
    assert not teams.open("vision", TeamMap(lambda _: "vision", "8")).ledger.closed


def test_an_older_quota_moves_no_ledger_when_the_ledger_of_a_team_is_opened(
    teams: TeamStore, ledgers: LedgerStore
) -> None:
    stored = ledgers.open("team-a")
    ledgers.write("team-a", Ledger(USED, team_version="9"), stored)
    with pytest.raises(Unavailable):
        teams.open("vision", PLACED)
    assert ledgers.read("team-a").ledger.allotments == {}


def test_errors_about_the_ledger_of_another_namespace_do_not_name_it(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    """The owner of a pod gets the text of the error."""
    member(ledgers)
    path = ledgers.path("team-a")
    whole = api.objects[path]
    api.store(path, {**whole, "data": {"ledger": "{"}})
    with pytest.raises(Unavailable, match="the ledger of a namespace of team vision has not been counted yet"):
        teams.open("vision", PLACED)
    api.store(path, whole)
    get = api.get

    def late(path: str, *args: Any, **others: Any) -> bytes:
        if path.endswith("team-a"):
            raise Unavailable(f"{path}: timed out")
        return get(path, *args, **others)

    api.get = late  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="the ledger of a namespace of team vision has not been counted yet"):
        teams.open("vision", PLACED)


def test_a_damaged_ledger_of_another_namespace_is_not_named(
    api: ApiDouble, teams: TeamStore, ledgers: LedgerStore
) -> None:
    """The owner of a pod gets the text of the error."""
    member(ledgers, vision=Allotment())
    path = ledgers.path("team-a")
    api.store(path, {**api.objects[path], "data": {"ledger": "{"}})
    with pytest.raises(Unavailable, match="the ledger of a namespace of team vision cannot be read"):
        teams.open("vision")
    assert teams.members("vision")[1] == {"team-a": Ledger()}
