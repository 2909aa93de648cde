"""Tests of the leader's part in the ledgers of teams: joins, forced raises, unused allotments and ended namespaces."""

import contextlib
from collections.abc import Mapping

import msgspec
import pytest
import structlog

from controller.recount.team_allotments import CROWDED, is_short_of
from tests.api_double import ApiDouble, Delivery, Script, before, delivered, lost_reply, lost_request, rejected
from tests.builders import stored_pod
from tests.quota_map import store_quota
from tests.recounting import CARD, ONE, TWO, Recounting
from tests.replicas import LEDGER, Replica
from tests.tables import cases
from tests.watching import catch_up
from vcuda import errors
from vcuda.kube.team_store import TeamStore, team_ledger_name
from vcuda.ledger.ledger import FULL, Allotment, Ledger, Pending, Reservation, Terminating
from vcuda.ledger.team import MAX_MEMBERS, Allotted, TeamLedger, raised
from vcuda.quota.model import Charge, Limit, Team

ALONE, VISION, OCEAN = (
    "{}",
    "{vision: {namespaces: [team-a, team-b], quota: {M40: 8}}}",
    ("{ocean: {namespaces: [team-a], quota: {M40: 8}}, vision: {namespaces: [team-b], quota: {M40: 8}}}"),
)
FOUR = Charge(400, 0, 400)
OWN = '{"team-a": {"quota": {"M40": 4}}}'
COLLECTION = LEDGER.rpartition("/")[0]
Allotments = Mapping[str, Allotted]


class World(Recounting):
    """A recounter whose namespace team-a has this ledger and these pods, and may be in team `vision`."""

    def __init__(self, api: ApiDouble, replica: Replica, ledger: Ledger, cards: int = 0, teams: str = VISION) -> None:
        pods = [
            {**pod, "metadata": {**pod["metadata"], "name": f"train-{number}"}}
            for number, pod in ((number, stored_pod(CARD, f"uid-{number}")) for number in range(cards))
        ]
        super().__init__(api, replica, ledger, *pods)
        self.api, self.store, self.teams = api, replica.store, TeamStore(replica.store)
        self.place(teams)

    def place(self, teams: str, entries: str = "{}") -> None:
        """Edit the quota."""
        store_quota(self.api, entries, gpu_teams=teams)
        self.relist()

    def allot(self, **allotted: Allotted) -> None:
        """Write the ledger of team `vision`."""
        stored = self.teams.open("vision")
        self.teams.write("vision", msgspec.structs.replace(stored.ledger, allotted=allotted), stored)
        self.relist()

    def allotted(self, team: str = "vision") -> Allotments:
        return self.teams.read(team).ledger.allotted

    def ledger(self) -> Ledger:
        return self.store.read("team-a").ledger

    def relist(self) -> None:
        super().relist()
        catch_up(self.recounter.teams.ledgers)

    def serve(self, team: str = "vision") -> list[str]:
        """Take a turn for a team. Return the logged warnings."""
        self.relist()
        with structlog.testing.capture_logs() as logs:
            self.recounter.teams.reconciler.turn(team)
        return [line["event"] for line in logs if line["log_level"] == "warning"]


# Tests of joins, moves and leaves, at a recount


def test_a_namespace_that_joins_a_team_brings_its_charges_even_if_they_exceed_the_limit(
    api: ApiDouble, replica: Replica
) -> None:
    world = World(api, replica, Ledger({"M40": TWO}), 2)
    unused = Ledger({"M40": Charge(500)}, allotments={"vision": Allotment({"M40": Charge(800)}, "checked")})
    world.store.write("team-b", unused, world.store.open("team-b"))
    world.allot(**{"team-b": {"M40": Charge(800)}})
    world.recount()
    assert world.allotted() == {"team-b": {"M40": Charge(500)}, "team-a": {"M40": TWO}}
    # While the team is over its limit, no namespace may use an allotment without a look at the ledger of the team.
    allotments = [world.store.read(namespace).ledger.allotments["vision"] for namespace in ("team-a", "team-b")]
    assert [(each.charges["M40"], each.terms) for each in allotments] == [(TWO, ""), (Charge(500), "")]
    assert not world.teams.read("vision").ledger.closed


def test_a_namespace_that_fits_into_the_team_takes_no_allotment_from_others(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": TWO}), 2)
    world.allot(**{"team-b": {"M40": Charge(600)}})
    world.recount()
    assert world.allotted() == {"team-b": {"M40": Charge(600)}, "team-a": {"M40": TWO}}


def test_an_idle_namespace_joins_leaves_and_changes_teams(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    for teams, named in ((VISION, ["vision"]), (OCEAN, ["ocean"]), (VISION, ["vision"]), (ALONE, [])):
        world.place(teams, OWN)
        world.recount()
        assert [*world.ledger().allotments] == named
    for team in ("vision", "ocean"):
        for _ in range(2):  # the allotment is taken back, and then the ledger of the team is deleted
            world.serve(team)
        assert world.teams.read(team).version is None


def test_the_charges_of_a_namespace_that_changes_its_team_count_in_the_old_team_until_they_do_in_the_new_one(
    api: ApiDouble, replica: Replica
) -> None:
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.recount()
    world.place(OCEAN)
    api.deliver = rejected(errors.Unavailable("down"), "POST")  # the ledger of team ocean cannot be created
    with pytest.raises(errors.WriteUnanswered):
        world.recount()
    api.deliver = delivered
    assert [*world.ledger().allotments] == ["vision", "ocean"]
    world.serve("vision")
    assert world.allotted("vision") == {"team-a": {"M40": ONE}}


def test_an_older_quota_moves_no_namespace_back(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.recount()
    stored = world.store.open("team-a")
    newer = msgspec.structs.replace(stored.ledger, allotments={"ocean": Allotment()}, team_version="1000000")
    world.store.write("team-a", newer, stored)
    world.relist()
    world.recount()
    assert world.ledger().allotments == {"ocean": Allotment()}


def test_a_namespace_without_a_team_causes_no_more_requests_and_no_more_text(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": TWO}, "103"), 1, teams=ALONE)
    world.place(ALONE, OWN)
    api.forget_calls()
    world.recount()
    assert api.calls == ["PUT"]
    text = api.objects[LEDGER]["data"]["ledger"]
    assert "allotments" not in text
    assert "teamVersion" not in text


# Tests of charges beyond the allotment, which a recount finds


def test_an_allotment_is_raised_after_a_recount_found_more_pods(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.recount()
    api.store("/api/v1/namespaces/team-a/pods/more", _pod("more"))
    world.relist()
    api.forget_calls()
    world.recount()
    assert api.calls == ["PUT", "GET", "PUT", "PUT"]
    assert (world.allotted(), world.ledger().committed) == ({"team-a": {"M40": TWO}}, {"M40": TWO})
    assert world.ledger().allotments["vision"].charges == {"M40": TWO}


def test_reservations_need_no_allotment_at_a_recount(api: ApiDouble, replica: Replica) -> None:
    """A recount counts the pods of a reservation twice, until the replica writes its ledger."""
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.recount()
    stored = world.store.open("team-a")
    reserved = {"replica": Reservation({"M40": TWO}, 1)}
    world.store.write("team-a", msgspec.structs.replace(stored.ledger, reserved=reserved), stored)
    world.relist()
    world.recount()
    assert world.allotted() == {"team-a": {"M40": ONE}}


def test_the_reservations_of_a_namespace_that_joins_a_team_count(api: ApiDouble, replica: Replica) -> None:
    """A replica that has not read the edit may still admit pods from its reservation."""
    reserved = {"replica": Reservation({"M40": TWO}, 1)}
    world = World(api, replica, Ledger({"M40": ONE}, reserved=reserved), 1)
    world.recount()
    used = world.ledger().usage("M40")
    assert used.reserved == TWO
    assert world.allotted() == {"team-a": {"M40": used.used}}


def _pod(name: str) -> dict[str, object]:
    pod = stored_pod(CARD, f"uid-{name}")
    return {**pod, "metadata": {**pod["metadata"], "name": name, "namespace": "team-a"}}


@cases(
    "lost",
    refused=rejected(errors.ApiError(403, "no"), "PUT"),
    unanswered=lost_request,
    stored_without_an_answer=lost_reply,
    conflict=rejected(errors.Conflict(409, "modified"), "PUT"),
)
def test_no_more_is_in_a_ledger_than_its_team_allots_whatever_write_is_lost(
    api: ApiDouble, replica: Replica, lost: Delivery
) -> None:
    """The work queue retries the recount after each of these errors."""
    for writes in range(4):
        world = World(api, replica, Ledger({"M40": ONE}), 1)
        world.recount()
        api.store("/api/v1/namespaces/team-a/pods/more", _pod("more"))
        world.relist()
        api.deliver = Script(*[delivered] * writes, *[lost] * 10, methods=("PUT",))
        with contextlib.suppress(errors.VcudaError):
            world.recount()
        api.deliver = delivered
        allotted = world.allotted()["team-a"]["M40"]
        assert allotted.covers(world.ledger().allotments["vision"].charges["M40"])
        world.recount()
        assert (world.allotted(), world.ledger().committed) == ({"team-a": {"M40": TWO}}, {"M40": TWO})
        api.objects.clear()


def test_no_more_namespaces_than_the_maximum_get_an_allotment(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.allot(**{f"n{number}": {"M40": ONE} for number in range(MAX_MEMBERS)})
    world.recount()
    assert "team-a" not in world.allotted()
    assert world.ledger().allotments["vision"].charges == {}


# Tests of the allotments that the leader takes back


@pytest.fixture
def spare(api: ApiDouble, replica: Replica) -> World:
    """A team in which namespace team-a needs one card, and may use four."""
    world = World(api, replica, Ledger({"M40": ONE}), 1)
    world.recount()
    stored = world.store.open("team-a")
    four = {"vision": Allotment({"M40": FOUR}, "checked", 3)}
    world.store.write("team-a", msgspec.structs.replace(stored.ledger, allotments=four), stored)
    world.allot(**{"team-a": {"M40": FOUR}})
    return world


def want(world: World, text: str) -> None:
    """Write the mark of a replica that finds no free quota in the team."""
    stored = world.teams.read("vision")
    world.teams.write("vision", msgspec.structs.replace(stored.ledger, wanted=text), stored)


def test_unused_allotments_stay_while_the_team_has_much_free_quota(spare: World) -> None:
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": FOUR}}


def test_unused_allotments_are_taken_back_while_the_team_is_short(spare: World) -> None:
    spare.allot(**{"team-a": {"M40": FOUR}, "team-b": {"M40": Charge(300)}})
    spare.serve()
    assert spare.allotted()["team-a"] == {"M40": ONE}
    assert spare.ledger().allotments["vision"] == Allotment({"M40": ONE}, "checked", 4)


def test_empty_allotments_take_no_place_of_other_namespaces(spare: World) -> None:
    spare.allot(**{"team-a": {}, **{f"n{number}": {"M40": Charge()} for number in range(CROWDED)}, "team-b": {}})
    spare.serve()
    assert spare.allotted() == {}


def test_the_old_team_of_a_namespace_is_queued(spare: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allotment there must not wait for the next resync."""
    spare.place(OCEAN)
    queued: list[str] = []
    monkeypatch.setattr(spare.recounter.teams.reconciler.queue, "add", queued.append)
    spare.recount()
    assert queued.count("vision") == 2, "when it joins the new team, and when it has left the old one"
    spare.serve()
    assert spare.allotted() == {}


def test_each_mark_of_a_replica_that_lacks_quota_is_served_once(spare: World, api: ApiDouble) -> None:
    want(spare, "x")
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": ONE}}
    spare.allot(**{"team-a": {"M40": TWO}})
    api.forget_calls()
    spare.serve()
    assert "PUT" not in api.calls
    want(spare, "y")
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": ONE}}


def test_a_raise_during_the_release_is_not_lost(spare: World, api: ApiDouble) -> None:
    """A replica writes the ledger of the team between the read and the write of the leader."""
    want(spare, "x")
    spare.relist()

    def raise_() -> None:
        api.deliver = lambda _method, _timeout, effect: effect()
        stored = spare.teams.read("vision")
        spare.teams.write("vision", raised(stored.ledger, "team-a", {"M40": Charge(500, 0, 500)}), stored)

    api.deliver = before("PUT", raise_)
    spare.recounter.teams.reconciler.turn("vision")
    assert spare.allotted() == {"team-a": {"M40": Charge(500, 0, 500)}}
    assert spare.recounter.teams.reconciler.queue.is_active("vision"), "retried"
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": ONE}}


@cases(
    "ledger",
    too_many_deleted_pods=Ledger(terminating={f"M40{FULL}600": Terminating("M40", Charge(10**7), 600)}),
    pending=Ledger(pending={"uid": Pending("M40", FOUR)}),
)
def test_an_allotment_that_may_be_used_is_not_taken_back(spare: World, ledger: Ledger) -> None:
    stored = spare.store.open("team-a")
    spare.store.write("team-a", msgspec.structs.replace(ledger, allotments=stored.ledger.allotments), stored)
    want(spare, "x")
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": FOUR}}


def test_the_allotment_of_an_ended_namespace_is_released(spare: World, api: ApiDouble) -> None:
    spare.place("{vision: {namespaces: [team-b], quota: {M40: 8}}}")
    for name in [path for path in api.objects if "/pods/" in path]:
        api.remove(name)
    spare.relist()
    for _ in range(3):
        spare.later(1000)
        spare.recount()
        spare.relist()
    assert LEDGER not in api.objects
    spare.serve()
    assert spare.allotted() == {}


def test_the_allotment_of_a_lost_ledger_stays(spare: World, api: ApiDouble) -> None:
    """Pods that were charged in the lost ledger may still be stored."""
    api.remove(LEDGER)
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": FOUR}}


def test_the_ledger_of_a_deleted_team_is_deleted_when_nothing_is_allotted(spare: World, api: ApiDouble) -> None:
    spare.place(ALONE, OWN)
    spare.serve()
    assert spare.allotted() != {}, "team-a has not left the team yet"
    spare.recount()
    for _ in range(2):
        spare.serve()
    assert f"{COLLECTION}/{team_ledger_name('vision')}" not in api.objects


def test_a_deleted_team_ledger_is_rebuilt_from_the_ledgers_of_its_namespaces(spare: World, api: ApiDouble) -> None:
    api.remove(f"{COLLECTION}/{team_ledger_name('vision')}")
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": ONE}}
    assert not spare.teams.read("vision").ledger.closed


def test_a_team_without_a_ledger_gets_none_before_it_is_needed(api: ApiDouble, replica: Replica) -> None:
    world = World(api, replica, Ledger(), teams=VISION)
    world.recounter.teams.add_all()
    world.serve()
    assert not [path for path in api.objects if "gpu-ledger-team." in path]


@cases(
    "allotted, limits, short",
    little=({"a": {"M40": Charge(500)}}, {}, False),
    three_quarters=({"a": {"M40": Charge(600)}}, {}, False),
    more=({"a": {"M40": Charge(300)}, "b": {"M40": Charge(301)}}, {}, True),
    memory=({"a": {"M40": Charge(0, 800)}}, {"limits": {"M40": Limit(None, 1000, 100)}}, True),
    total=({"a": {"M40": Charge(200)}, "b": {"P100": Charge(200)}}, {"total": Limit(500)}, True),
    many_namespaces=({f"n{number}": {} for number in range(CROWDED + 1)}, {}, True),
)
def test_a_team_is_short_if_less_than_a_quarter_of_a_limit_is_left(
    allotted: Allotments, limits: dict[str, object], short: bool
) -> None:
    team = Team("vision", **{"limits": {"M40": Limit(800)}, **limits})  # type: ignore[arg-type]
    assert is_short_of(team, TeamLedger(allotted)) is short
