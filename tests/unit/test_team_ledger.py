"""Tests of the ledger of a team: its text, and the rules by which it allots quota to namespaces."""

from collections.abc import Iterable

import pytest
from msgspec.structs import replace

from tests.tables import cases
from vcuda.ledger.ledger import FULL, Allotment, Ledger, Pending, Reservation, Terminating, charges_by_model
from vcuda.ledger.recount import ObservedPods, recount
from vcuda.ledger.team import (
    Allotted,
    Membership,
    TeamLedger,
    allot,
    allotted_to_others,
    cover,
    covers,
    fits_team,
    fitting,
    join,
    leave,
    lowered,
    needed,
    raised,
    read_team_ledger,
    shrunk,
    write_team_ledger,
)
from vcuda.ledger.text import FORMAT, OtherFormat, read_ledger, write_ledger
from vcuda.quota.model import Charge, Limit, Team

TEAM = Team("vision", {"A100": Limit(800), "T4": Limit(400, 65536)}, Limit(1000))
ONE_CARD = Charge(100, 0, 100)
CARDS = {count: {"A100": Charge(100 * count)} for count in range(10)}


def test_the_ledger_of_a_team_is_read_back_as_it_was_written() -> None:
    ledger = TeamLedger({"dev": {"A100": Charge(100, 0, 100)}, "train": {}}, "7", "more", "closed", 3)
    assert read_team_ledger(write_team_ledger(ledger)) == ledger


@cases("text", nothing="", no_format="{}", no_amount='{"format": 2, "allotted": {"dev": {"A100": {"cores": 0.5}}}}')
def test_a_damaged_ledger_of_a_team_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_team_ledger(text)


def test_the_ledger_of_a_team_in_another_format_is_an_error() -> None:
    with pytest.raises(OtherFormat):
        read_team_ledger('{"format": 99}')


def test_the_ledger_of_a_namespace_without_a_team_stores_nothing_more() -> None:
    text = write_ledger(Ledger())
    assert text == f'{{"format":{FORMAT},"committed":{{}},"podResourceVersion":"","pending":{{}}}}'


def test_an_allotment_is_read_back_and_is_kept_by_a_recount() -> None:
    ledger = Ledger(allotments={"vision": Allotment(CARDS[3], "terms", 7)}, team_version="12")
    assert read_ledger(write_ledger(ledger)) == ledger
    counted = recount(ledger, ObservedPods("5", {"A100": ONE_CARD}, ()))
    assert (counted.committed, counted.allotments, counted.team_version) == (
        {"A100": ONE_CARD},
        ledger.allotments,
        ledger.team_version,
    )


def test_a_namespace_needs_its_charges_and_reservations() -> None:
    ledger = Ledger(
        committed=CARDS[1],
        pending={"a": Pending("A100", ONE_CARD), "b": Pending("", Charge(), 600)},
        reserved={"replica": Reservation({"T4": Charge(200)}, 1)},
    )
    assert needed(ledger) == {"A100": Charge(100) + ONE_CARD, "T4": Charge(200)}


def test_the_allotments_of_the_others_are_added_up_by_model() -> None:
    ledger = TeamLedger({"dev": CARDS[1], "test": {**CARDS[2], "T4": Charge(50)}, "train": CARDS[4]})
    assert allotted_to_others(ledger, "train") == {"A100": Charge(300), "T4": Charge(50)}
    assert allotted_to_others(TeamLedger(), "train") == {}


def test_the_allotments_of_a_large_team_are_added_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each raise of each namespace needs the sum of the others."""
    added: list[int] = []

    def counted(charges: Iterable[tuple[str, Charge]]) -> Allotted:
        added.append(1)
        return charges_by_model(charges)

    monkeypatch.setattr("vcuda.ledger.team.charges_by_model", counted)
    ledger = TeamLedger({f"n{number}": {"A100": Charge(100)} for number in range(500)})
    for number in range(3):
        assert allotted_to_others(ledger, f"n{number}") == {"A100": Charge(49_900)}
    assert len(added) == 1


@cases(
    "of_others, own, fit",
    the_limit_of_a_model=(CARDS[5], CARDS[3], True),
    one_more_than_the_limit_of_a_model=(CARDS[5], CARDS[4], False),
    others_beyond_a_limit=(CARDS[9], {}, False),
    memory=({"T4": Charge(0, 65536)}, {"T4": Charge(0, 1)}, False),
    the_total=(CARDS[7], {"T4": Charge(300)}, True),
    one_more_than_the_total=(CARDS[7], {"T4": Charge(301)}, False),
    a_model_without_a_limit_in_the_total=(CARDS[7], {"P100": Charge(301)}, False),
)
def test_a_namespace_fits_within_all_limits_of_its_team(
    of_others: dict[str, Charge], own: dict[str, Charge], fit: bool
) -> None:
    assert fits_team(TEAM, of_others, own) is fit


def test_a_model_of_a_team_beyond_its_limit_leaves_room_for_other_models() -> None:
    others = {"A100": Charge(900), "T4": Charge(100)}
    assert fitting(replace(TEAM, total=None), others, {"A100": ONE_CARD, "T4": Charge(100)}) == {"T4": Charge(100)}
    assert fitting(TEAM, CARDS[7], {**CARDS[1], "P100": Charge(301)}, CARDS[1]) == CARDS[1], "the total is exceeded"


@cases(
    "others, recorded, charges, fit",
    a_recorded_allotment_that_fits=(CARDS[4], CARDS[3], CARDS[3], True),
    a_recorded_allotment_that_does_not_fit=(CARDS[6], CARDS[3], CARDS[2], True),
    usage_that_does_not_fit=(CARDS[7], CARDS[3], CARDS[2], False),
)
def test_pods_that_run_already_are_covered_and_the_rest_of_an_allotment_only_if_it_fits(
    others: dict[str, Charge], recorded: dict[str, Charge], charges: dict[str, Charge], fit: bool
) -> None:
    covered = cover(TEAM, TeamLedger({"train": others}), "dev", recorded=recorded, used=CARDS[2])
    assert (covered.team.allotted["dev"], covered.charges, covered.fits) == (charges, charges, fit)
    again = cover(TEAM, covered.team, "dev", recorded=charges, used=CARDS[2])
    assert again.fits, "the team ledger counts these charges already"


def test_a_raise_lowers_no_amount() -> None:
    before = TeamLedger({"dev": {"A100": Charge(300, 0, 300), "T4": Charge(100)}, "train": CARDS[1]}, "1")
    after = raised(before, "dev", {"A100": Charge(200, 512, 400)}, "2")
    dev = {"A100": Charge(300, 512, 400), "T4": Charge(100)}
    assert after == TeamLedger({"dev": dev, "train": CARDS[1]}, "2", counter=1)


def test_a_namespace_that_uses_nothing_takes_no_place_in_the_ledger_of_its_team() -> None:
    assert raised(TeamLedger(), "dev", {}).allotted == {}


def test_a_raise_always_changes_the_ledger() -> None:
    """The API server gives a write that changes nothing no new version, so another write would not notice it."""
    before = TeamLedger({"dev": CARDS[3]}, "1")
    assert raised(before, "dev", CARDS[1], "1") != before
    assert raised(before, "dev", CARDS[1]) == replace(before, counter=1), "a raise without a check"


def test_charges_that_fill_a_namespace_do_not_fill_its_team() -> None:
    """So many pods were deleted that only their namespace is known. They were admitted within the allotment."""
    full = {f"A100{FULL}": Terminating("A100", Charge(10**9), 30), "a": Terminating("A100", ONE_CARD, 30)}
    ledger = Ledger(terminating=full, allotments={"vision": Allotment(CARDS[5])})
    assert needed(ledger) == {"A100": ONE_CARD}
    assert shrunk(ledger, "vision").allotments == {"vision": Allotment(CARDS[5], counter=1)}


def test_unused_quota_is_taken_back_from_both_ledgers() -> None:
    ledger = Ledger(committed=CARDS[1], allotments={"vision": Allotment(CARDS[5], "terms", 3)})
    assert shrunk(ledger, "vision").allotments == {"vision": Allotment(CARDS[1], "terms", 4)}
    team = TeamLedger({"dev": CARDS[5], "train": CARDS[1]}, "1")
    assert lowered(team, "dev", CARDS[1]) == replace(team, allotted={"dev": CARDS[1], "train": CARDS[1]})
    assert lowered(team, "dev", {}) == replace(team, allotted={"train": CARDS[1]})


def test_no_allotment_grows_when_unused_quota_is_taken_back() -> None:
    """A namespace that joined the team with pods has no allotment for them yet."""
    ledger = Ledger(committed=CARDS[3], allotments={"vision": Allotment(CARDS[1])})
    assert shrunk(ledger, "vision").allotments["vision"].charges == CARDS[1]
    assert lowered(TeamLedger({"dev": CARDS[1]}), "dev", CARDS[3]).allotted == {"dev": CARDS[1]}


def test_a_namespace_that_changes_teams_names_both_until_it_has_an_allotment() -> None:
    old = Ledger(committed=CARDS[2], allotments={"speech": Allotment(CARDS[2], "terms", 1)}, team_version="1")
    joined = join(old, "vision", "2")
    assert (joined.allotments, joined.team_version) == ({**old.allotments, "vision": Allotment()}, "2")
    assert allot(joined, "vision", CARDS[2], "new").allotments == {"vision": Allotment(CARDS[2], "new")}
    assert leave(joined, "3") == Ledger(committed=CARDS[2], team_version="3")


@cases(
    "allotted_to_others, names, team_version",
    the_new_team_has_room=(CARDS[4], {"vision"}, "7"),
    the_new_team_is_full=(CARDS[8], {"speech", "vision"}, "2"),
)
def test_a_namespace_leaves_its_old_team_only_when_the_new_team_allots_its_charges(
    allotted_to_others: dict[str, Charge], names: set[str], team_version: str
) -> None:
    moving = Ledger({"A100": Charge(200)}, allotments={"speech": Allotment(CARDS[2])}, team_version="1")
    team = TeamLedger({"train": allotted_to_others})
    membership = Membership(TEAM, "7", enforced=True)
    after = membership.raise_allotment(team, "dev", join(moving, "vision", "2"), planned=CARDS[2], extra={}).ledger
    assert ({*after.allotments}, after.team_version) == (names, team_version)


@cases(
    "others, total, allotted",
    much_is_free=(0, None, 600),
    a_quarter_of_the_free_quota=(4000, None, 600),
    more_than_a_quarter=(4001, None, 150),
    a_quarter_of_the_free_cards_of_all_models=(0, 24, 600),
    more_than_a_quarter_of_the_free_cards_of_all_models=(0, 23, 150),
    only_the_charge_fits=(6300, None, 100),
)
def test_a_raise_allots_more_than_is_needed_only_while_much_quota_is_free(
    others: int, total: int | None, allotted: int
) -> None:
    team = Team("vision", {"A100": Limit(6400)}, Limit(100 * total) if total else None)
    membership = Membership(team, "7", enforced=True)
    stored = TeamLedger({"train": {"A100": Charge(others)}} if others else {})
    written = membership.raise_allotment(stored, "dev", Ledger(), planned=CARDS[1], extra={"A100": Charge(50)})
    assert written.team.allotted["dev"] == {"A100": Charge(allotted)}


def test_an_allotment_by_the_same_limits_in_an_older_document_is_checked_again() -> None:
    """Between the two documents, the limits may have been others, by which other namespaces used the quota."""
    older, newer = (Membership(TEAM, version, enforced=True) for version in ("7", "8"))
    ledger = older.raise_allotment(TeamLedger(), "dev", Ledger(), planned=CARDS[2], extra={}).ledger
    assert older.allots(ledger, CARDS[2])
    assert not newer.allots(ledger, CARDS[2])


def test_an_allotment_covers_each_amount_of_each_model() -> None:
    assert covers(CARDS[2], CARDS[2])
    assert not covers(CARDS[2], CARDS[3])
    assert not covers(CARDS[2], {"A100": Charge(100, 1)})
    assert not covers(CARDS[2], {"T4": Charge(1)})
    assert covers({}, {"T4": Charge()})
