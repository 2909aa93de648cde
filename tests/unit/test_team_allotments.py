"""Tests of the leader's part in the ledgers of teams: joins, moves, leaves and forced raises."""

import contextlib

import msgspec
import pytest

from tests.api_double import ApiDouble, Delivery, Script, delivered, lost_reply, lost_request, rejected
from tests.builders import stored_pod
from tests.recounting import CARD, ONE, TWO
from tests.replicas import LEDGER, Replica
from tests.tables import cases
from tests.team_world import ALONE, COLLECTION, OCEAN, OWN, VISION, World
from vcuda import errors
from vcuda.kube.team_store import team_ledger_name
from vcuda.ledger.ledger import Allotment, Ledger, Reservation
from vcuda.ledger.team import MAX_MEMBERS
from vcuda.quota.model import Charge

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


def test_a_ledger_that_a_user_deletes_is_never_missing_in_a_count_of_its_team(api: ApiDouble, replica: Replica) -> None:
    """Both ledgers may be deleted together. The team is then opened by a count of the ledgers and marks that exist."""
    world = World(api, replica, Ledger({"M40": TWO}, "103"), 2)
    world.recount()
    api.delete(LEDGER)
    api.remove(f"{COLLECTION}/{team_ledger_name('vision')}")
    world.relist()
    world.recount()
    assert world.ledger().committed == {"M40": TWO}
    assert world.allotted() == {"team-a": {"M40": TWO}}


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
