"""A sweep whose time is up, or that is to stop: what is left is for the next, and nothing waits for ever."""

from functools import partial

import pytest

from controller.garbage.node.names import TRASH, Keep, KeepReason
from tests.integration.node.disk import HOUR, RETENTION, Agent, Disk, nested, uid
from tests.integration.node.steps import Steps


def test_when_time_runs_out_what_has_been_in_the_trash_longest_is_gone_first(disk: Disk, agent: Agent) -> None:
    for number in (3, 1, 2):
        nested(disk, number)
        agent.sweep_after_grace()
    disk.clocks.advance(RETENTION)
    for left in ([1, 2], [2], []):
        agent.sweep(give_up=partial(holds, disk, len(left)))
        assert {name.partition(".")[0] for name in disk.trash()} == set(map(uid, left))


def holds(disk: Disk, count: int) -> bool:
    """Whether so much is left in the trash."""
    return len(disk.trash()) == count


def test_a_deletion_that_is_out_of_time_goes_on_with_the_next_sweep(
    disk: Disk, agent: Agent, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.garbage.node.fs.BATCH", 0)
    nested(disk, 1)
    agent.sweep_after_grace()
    agent.sweep()
    disk.clocks.advance(RETENTION)
    [trashed] = disk.trash()
    first = steps.taken
    said = agent.sweep(give_up=lambda: steps.taken >= first + 4)
    assert said[f"{TRASH}/{trashed}"].keep == Keep(KeepReason.TOO_MANY)
    assert steps.taken == first + 4
    agent.sweep()
    assert disk.trash() == set()


def files_in_trash(disk: Disk) -> dict[str, int]:
    """How many files each directory there has still, by its former name."""
    trashed = (disk.root / TRASH).iterdir()
    return {path.name.partition(".")[0]: sum(each.is_file() for each in path.rglob("*")) for path in trashed}


def test_where_the_check_alone_takes_a_period_a_tree_goes_in_the_end_and_holds_up_no_other(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is up before anything is deleted, in every sweep; the other's too, as it comes after it."""
    monkeypatch.setattr("controller.garbage.node.fs.BATCH", 4)
    for number, files in ((1, 9), (2, 5)):
        path = disk.make(uid(number))
        for name in range(files - 2):
            (path / str(name)).touch()
        disk.age(path, HOUR)
        agent.sweep_after_grace()
    disk.clocks.advance(RETENTION)
    left = []
    for _ in range(6):
        agent.sweep(give_up=lambda: True)
        left.append(files_in_trash(disk))
    [large, small] = [[each.get(uid(number), 0) for each in left] for number in (1, 2)]
    assert large[0] < 9, "a batch, whatever the time"
    assert small[0] == 5
    assert small[1] < 5, "then it is the other's turn"
    assert large[1] == large[0]
    assert (left[-1], disk.trash()) == ({}, set())


def test_where_the_root_takes_all_the_time_the_trash_has_its_turn(disk: Disk, agent: Agent) -> None:
    nested(disk, 1)
    agent.sweep_after_grace()
    for number in (2, 3):
        nested(disk, number)
    agent.sweep()
    disk.clocks.advance(RETENTION)
    agent.sweep(give_up=lambda: True)
    assert len(disk.names()) == 1, "one moved"
    assert len(disk.trash()) == 1, "one deleted"


def test_stopping_ends_a_sweep_at_its_next_step(disk: Disk, agent: Agent, steps: Steps) -> None:
    """Though there be a million files to look at, or to delete."""
    nested(disk, 1)
    agent.sweep_after_grace()
    agent.sweep()
    disk.clocks.advance(RETENTION)
    first = steps.taken
    agent.sweep(stopping=lambda: steps.taken >= first + 4)
    assert steps.taken == first + 4
    asked = iter([False, False])  # before the directory, and at the first entry in it
    agent.sweep(stopping=lambda: next(asked, True))
    assert (steps.taken, next(asked, None)) == (first + 5, None), "it only looked for the trash"
