"""Tests of the allotments that the leader takes back: unused ones, and those of namespaces that have ended."""

import itertools

import msgspec
import pytest

from controller.recount import team_allotments
from controller.recount.team_allotments import CROWDED, is_short_of
from tests.api_double import ApiDouble, Effect, before
from tests.recounting import ONE, TWO
from tests.replicas import LEDGER, Clock, Replica
from tests.tables import cases
from tests.team_world import ALONE, COLLECTION, FOUR, OCEAN, OWN, VISION, Allotments, World
from vcuda import errors
from vcuda.kube import Stored
from vcuda.kube.team_store import team_ledger_name
from vcuda.ledger.ledger import FULL, Allotment, Ledger, Pending, Terminating
from vcuda.ledger.team import TeamLedger, raised
from vcuda.quota.model import Charge, Limit, Team


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


IDLE = ("idle-0", "idle-1", "idle-2", "idle-3")


@pytest.fixture
def idle(api: ApiDouble, replica: Replica) -> World:
    """A team whose namespaces have ledgers that use nothing, and may use four cards each."""
    world = World(
        api, replica, Ledger(), teams=f"{{vision: {{namespaces: [{', '.join(IDLE)}, busy], quota: {{M40: 8}}}}}}"
    )
    for name in IDLE:
        stored = replica.store.open(name)
        ledger = msgspec.structs.replace(stored.ledger, allotments={"vision": Allotment({"M40": FOUR})})
        replica.store.write(name, ledger, stored)
    return world


def want(world: World, text: str) -> None:
    """Write the mark of a replica that finds no free quota in the team."""
    stored = world.teams.read("vision")
    world.teams.write("vision", msgspec.structs.replace(stored.ledger, wanted=text), stored)


def test_unused_allotments_stay_while_the_team_has_much_free_quota(spare: World) -> None:
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": FOUR}}


def test_unused_allotments_are_taken_back_while_the_team_is_short(spare: World) -> None:
    spare.allot(**{"team-a": {"M40": Charge(700, 0, 700)}})
    spare.serve()
    assert spare.allotted()["team-a"] == {"M40": ONE}
    assert spare.ledger().allotments["vision"] == Allotment({"M40": ONE}, "checked", 4)


def test_empty_allotments_take_no_place_of_other_namespaces(spare: World) -> None:
    spare.allot(**{f"n{number}": {"M40": Charge()} for number in range(CROWDED + 1)})
    spare.serve()
    assert spare.allotted() == {}
    spare.allot(**{"team-a": {}, "team-b": {"M40": Charge(700, 0, 700)}})
    want(spare, "x")
    spare.serve()
    assert spare.allotted() == {}


def test_only_the_largest_unused_allotments_are_taken_back_until_the_team_is_not_short(idle: World) -> None:
    idle.allot(**{"idle-0": {"M40": ONE}, "idle-1": {"M40": FOUR}, "idle-2": {"M40": TWO}})
    idle.serve()
    assert idle.allotted() == {"idle-0": {"M40": ONE}, "idle-2": {"M40": TWO}}


def test_unused_allotments_are_taken_back_while_other_namespaces_raise_theirs(idle: World, api: ApiDouble) -> None:
    """Each raise writes the ledger of the team, and so do the marks of the replicas that find no free quota."""
    idle.allot(**{name: {"M40": TWO} for name in IDLE})
    puts = itertools.count()

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "PUT" and next(puts) % 3 == 0:
            api.deliver = lambda _method, _timeout, effect: effect()
            stored = idle.teams.read("vision")
            idle.teams.write("vision", raised(stored.ledger, "busy", {"M40": ONE}), stored)
            api.deliver = deliver
        return effect()

    want(idle, "x")
    api.deliver = deliver
    for _ in range(2 * len(IDLE)):
        idle.serve()
    assert not {*IDLE} & {*idle.allotted()}


def test_a_namespace_that_cannot_be_counted_keeps_no_allotment_of_others(
    idle: World, api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost ledger must be counted before it is opened, and a tenant can make the LIST of its pods slow."""
    idle.allot(**{name: {"M40": TWO} for name in IDLE})
    lost = IDLE[0]
    api.remove(idle.store.path(lost))
    opened = idle.store.open

    def open_(namespace: str) -> Stored:
        if namespace == lost:
            idle.later(10)
            raise errors.ListOverdue("the pods cannot be listed in time")
        return opened(namespace)

    monkeypatch.setattr(idle.store, "open", open_)
    want(idle, "x")
    idle.serve()
    assert idle.serve() == ["an allotment was not taken back"]
    assert {*idle.allotted()} == {lost}


def test_a_team_with_many_unused_allotments_does_not_delay_other_teams(
    idle: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle.allot(**{name: {"M40": TWO} for name in IDLE})
    want(idle, "x")
    monkeypatch.setattr(team_allotments, "TURN_SECONDS", 0.0)
    idle.serve()
    assert {*IDLE} <= {*idle.allotted()}
    assert idle.recounter.teams.reconciler.queue.is_active("vision"), "goes on in a later turn"


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


@cases(
    "ledger",
    late_watch_of_namespaces=Ledger(pending={"uid": Pending("M40", FOUR)}),
    deleted_namespace_whose_pods_still_run=Ledger(terminating={"uid": Terminating("M40", FOUR, 30)}),
)
def test_the_charges_of_a_namespace_that_seems_not_to_exist_count_in_its_team(
    api: ApiDouble, replica: Replica, ledger: Ledger
) -> None:
    allotments = {"vision": Allotment({"M40": FOUR}, "checked")}
    world = World(api, replica, msgspec.structs.replace(ledger, allotments=allotments), exists=False)
    world.allot(**{"team-a": {"M40": FOUR}})
    world.recount()
    want(world, "x")
    world.serve()
    assert world.allotted() == {"team-a": {"M40": FOUR}}
    assert world.ledger().allotments["vision"].charges == {"M40": FOUR}


def test_a_namespace_that_does_not_exist_keeps_neither_a_ledger_nor_an_allotment(
    api: ApiDouble, replica: Replica
) -> None:
    world = World(api, replica, Ledger(allotments={"vision": Allotment({"M40": FOUR}, "checked")}), exists=False)
    world.allot(**{"team-a": {"M40": FOUR}})
    for number in range(3):
        world.relist()
        world.recount()
        world.later(1000)
        want(world, f"{number}")
        world.serve()
    assert world.allotted() == {}
    assert LEDGER not in api.objects


def test_the_allotment_of_a_lost_ledger_stays(spare: World, api: ApiDouble) -> None:
    """Pods that were charged in the lost ledger may still be stored."""
    api.remove(LEDGER)
    spare.serve()
    assert spare.allotted() == {"team-a": {"M40": FOUR}}


def test_the_allotment_of_a_lost_ledger_is_released_even_if_the_namespace_has_no_pods(
    clock: Clock, spare: World, api: ApiDouble
) -> None:
    """Only the team still needs this ledger."""
    for path in [LEDGER, *(path for path in api.objects if "/pods/" in path)]:
        api.remove(path)
    spare.serve()
    clock.pass_by(1000)
    spare.relist()
    spare.recount()
    want(spare, "x")
    spare.serve()
    assert spare.allotted() == {}


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
