"""A sweep (a pass of the node agent) has a limited time. The next sweep continues, so every directory is handled."""

from functools import partial

import pytest

from controller.garbage.node.names import TRASH, Keep, KeepReason
from tests.integration.node.disk import HOUR, RETENTION, Agent, Disk, nested, uid
from tests.integration.node.steps import Steps


def test_when_time_runs_out_the_oldest_directory_in_the_trash_was_deleted_first(disk: Disk, agent: Agent) -> None:
    for number in (3, 1, 2):
        nested(disk, number)
        agent.sweep_after_grace()
    disk.clocks.advance(RETENTION)
    for left in ([1, 2], [2], []):
        agent.sweep(give_up=partial(holds, disk, len(left)))
        assert {name.partition(".")[0] for name in disk.trash()} == set(map(uid, left))


def holds(disk: Disk, count: int) -> bool:
    return len(disk.trash()) == count


def test_a_deletion_that_is_out_of_time_continues_in_the_next_sweep(
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
    trashed = (disk.root / TRASH).iterdir()
    return {path.name.partition(".")[0]: sum(each.is_file() for each in path.rglob("*")) for path in trashed}


def test_a_tree_whose_check_takes_all_the_time_is_finally_deleted_and_delays_no_other(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even then, each sweep deletes one batch of files. The next sweep continues with the other directory."""
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
    assert large[0] < 9, "the first sweep deletes one batch of the larger directory"
    assert small[0] == 5
    assert small[1] < 5, "the second sweep continues with the other directory"
    assert large[1] == large[0]
    assert (left[-1], disk.trash()) == ({}, set())


def test_if_the_root_takes_all_the_time_the_trash_still_has_its_turn(disk: Disk, agent: Agent) -> None:
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
    nested(disk, 1)
    agent.sweep_after_grace()
    agent.sweep()
    disk.clocks.advance(RETENTION)
    first = steps.taken
    agent.sweep(stopping=lambda: steps.taken >= first + 4)
    assert steps.taken == first + 4
    asked = iter([False, False])  # called before the sweep lists the trash, and at the first entry
    agent.sweep(stopping=lambda: next(asked, True))
    assert (steps.taken, next(asked, None)) == (first + 5, None), "the sweep listed only the trash"
