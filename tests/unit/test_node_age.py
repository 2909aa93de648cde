"""Tests of how long the node agent observes a directory before it deletes the directory."""

import pytest

from controller.garbage.node.age import Now, ObservedAge
from controller.garbage.node.names import Keep, KeepReason
from tests.tables import cases

GRACE = 300.0
WALL = 1_700_000_000.0
OLD = WALL - 86400
YOUNG, ONCE = Keep(KeepReason.YOUNG), Keep(KeepReason.SEEN_ONCE)


def at(seconds: float, *, wall: float | None = None) -> Now:
    """Return the moment ``seconds`` after the start. ``wall``: the wall clock's time, if it was set."""
    return Now(WALL + seconds if wall is None else wall, 1000 + seconds)


def seen(patience: ObservedAge, *moments: Now, inode: int = 1, stamp: float = OLD) -> list[Keep | None]:
    """Let one sweep per moment find a directory. Return why each sweep keeps it; None if it may be deleted."""
    said = []
    for moment in moments:
        patience.begin(moment)
        said.append(patience.hold("name", inode, stamp))
    return said


@pytest.fixture
def watched() -> ObservedAge:
    return ObservedAge(GRACE)


@cases(
    "moments, last",
    seen_once=([at(0)], ONCE),
    seen_twice_within_a_second=([at(0), at(1)], YOUNG),
    seen_twice_not_for_long_enough=([at(0), at(299)], YOUNG),
    seen_twice_for_long_enough=([at(0), at(300)], None),
    seen_several_times=([at(0), at(60), at(120), at(300)], None),
    the_clock_jumps_forward=([at(0), at(1, wall=WALL + 1e9)], YOUNG),
    the_clock_jumps_back_to_before_the_stamp=([at(0), at(300, wall=OLD - 1e6)], None),
    the_clock_jumps_back_to_just_after_the_stamp=([at(0), at(300, wall=OLD + 10)], YOUNG),
)
def test_a_directory_must_be_seen_twice_and_for_the_whole_grace_period(
    watched: ObservedAge, moments: list[Now], last: Keep | None
) -> None:
    assert seen(watched, *moments)[-1] == last


@cases(
    "stamp, last",
    changed_lately=(WALL + 1, YOUNG),
    changed_long_ago=(WALL, None),
    changed_in_the_future_by_a_clock_that_was_ahead=(WALL + 1e9, None),
)
def test_a_directory_changed_within_the_grace_period_stays(
    watched: ObservedAge, stamp: float, last: Keep | None
) -> None:
    assert seen(watched, at(0), at(300), stamp=stamp)[-1] == last


def test_a_directory_missing_in_a_sweep_starts_over(watched: ObservedAge) -> None:
    """A sweep lists only directories whose pod is deleted. So a missing directory may belong to a pod that exists."""
    seen(watched, at(0), at(60))
    watched.begin(at(120))
    assert seen(watched, at(400), at(460)) == [ONCE, YOUNG]


def test_another_directory_of_the_same_name_starts_over(watched: ObservedAge) -> None:
    seen(watched, at(0), at(60), inode=1)
    assert seen(watched, at(400), at(460), at(700), inode=2) == [ONCE, YOUNG, None]


def test_a_restarted_agent_starts_over() -> None:
    assert seen(ObservedAge(GRACE), at(0), at(300)) == [ONCE, None]
    assert seen(ObservedAge(GRACE), at(360), at(420)) == [ONCE, YOUNG]


def test_the_number_of_remembered_names_is_bounded() -> None:
    watched = ObservedAge(0, most=2)
    for _ in range(2):
        watched.begin(at(0))
        said = [watched.hold(name, 1, OLD) for name in "abc"]
    assert said == [None, None, Keep(KeepReason.TOO_MANY)]


def test_without_a_grace_two_sweeps_are_still_needed() -> None:
    assert seen(ObservedAge(0), at(0), at(0), stamp=WALL) == [ONCE, None]
