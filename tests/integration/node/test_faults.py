"""Tests of a sweep (a pass of the node agent) in which any step fails, or the agent is killed at the step.

No directory of an existing pod is lost, and every other directory is finally deleted.
"""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.names import Keep, KeepReason
from tests.integration.node import fuse
from tests.integration.node.disk import HOUR, Agent, Disk, need_root, nested, snapshot, tmpfs, uid
from tests.integration.node.steps import Killed, Steps

FAULTS = [errno.EBUSY, errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO]


def until_rest(disk: Disk, agent: Agent) -> None:
    """Sweep until all directories of deleted pods are deleted. The age of a partly deleted directory starts again."""
    for _ in range(3):
        agent.sweep()
        disk.clocks.advance(HOUR)
    agent.sweep()


def test_after_a_kill_at_any_step_the_next_agent_finishes_everything(disk: Disk, steps: Steps) -> None:
    nested(disk, 1)
    alive = snapshot(nested(disk, 2))
    disk.pods.uids = {uid(2)}
    until_rest(disk, Agent(disk))
    total = steps.taken
    assert total >= 8
    for point in range(total):
        nested(disk, 1)
        steps.stop(point, Killed())
        with pytest.raises(Killed):
            until_rest(disk, Agent(disk))
        steps.go_on()
        until_rest(disk, Agent(disk))
        assert disk.names() == {uid(2)}, point
        assert snapshot(disk.root / uid(2)) == alive, point


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("victim", ["link", "vcuda.config", "file", "main", "cache", uid(2)])
def test_a_directory_that_cannot_be_deleted_delays_no_other_and_is_retried(
    disk: Disk, agent: Agent, steps: Steps, number: int, victim: str
) -> None:
    nested(disk, 2)
    for each in (1, 3):
        (disk.root / uid(each)).mkdir()
    agent.let_grace_pass()
    steps.fail(number, victim)
    said = agent.sweep()
    assert said[uid(2)].keep == Keep(KeepReason.ERROR, os.strerror(number))
    assert disk.names() == {uid(2)}
    steps.go_on()
    disk.age(disk.root / uid(2), HOUR)
    assert agent.sweep()[uid(2)].verdict is Action.DELETED


@pytest.mark.parametrize("dead", [True, False], ids=["has died", "does not answer"])
def test_a_mount_point_whose_file_system_fails_delays_no_other_directory(
    disk: Disk, agent: Agent, *, dead: bool
) -> None:
    need_root()
    nested(disk, 1)
    with fuse.mounted(nested(disk, 2), dead=dead):
        said = agent.sweep_after_grace()
        assert said[uid(2)].keep == Keep(KeepReason.MOUNT)
        assert said[uid(1)].verdict is Action.DELETED
        assert disk.names() == {uid(2)}
    assert agent.reason(uid(2)) is None


class Unlisted:
    """A directory entry whose type is unknown (DT_UNKNOWN), and whose stat fails."""

    def __init__(self, entry: os.DirEntry[str], error: OSError) -> None:
        self.name = entry.name
        self._error = error

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        assert not follow_symlinks
        raise self._error


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_an_entry_of_unknown_type_stays_and_delays_no_other(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    nested(disk, 1)
    nested(disk, 2)
    plain = os.scandir

    @contextlib.contextmanager
    def scandir(fd: int) -> Iterator[Iterator[os.DirEntry[str] | Unlisted]]:
        error = OSError(number, os.strerror(number))
        with plain(fd) as listing:
            yield (Unlisted(each, error) if each.name == uid(1) else each for each in listing)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        said = agent.sweep_after_grace()
    assert said[uid(1)].keep == Keep(KeepReason.ERROR, os.strerror(number))
    assert disk.names() == {uid(1)}


def test_a_directory_that_the_vendor_deletes_meanwhile_is_not_an_error(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vendor's monitor may also delete directories of deleted pods."""
    nested(disk, 1)
    plain = os.unlink

    def unlink(name: str, **where: Any) -> None:
        plain(name, **where)
        plain(name, **where)

    agent.let_grace_pass()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        assert agent.sweep() == {}
    disk.age(disk.root / uid(1), HOUR)
    assert agent.sweep()[uid(1)].verdict is Action.DELETED


def test_a_read_only_file_system_keeps_everything_until_it_can_be_written(disk: Disk, agent: Agent) -> None:
    need_root()
    with tmpfs(disk.root, "size=1m"):
        nested(disk, 1)
        subprocess.run(("mount", "-o", "remount,ro", disk.root), check=True)
        assert agent.reason(uid(1)) is KeepReason.ERROR
        subprocess.run(("mount", "-o", "remount,rw", disk.root), check=True)
        assert agent.sweep()[uid(1)].verdict is Action.DELETED
