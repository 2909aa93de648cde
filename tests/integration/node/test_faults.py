"""Every step of a sweep (a pass of the node agent) is disturbed: its call fails, or the agent is killed.

No directory of an existing pod is lost, and every other directory is finally removed.
"""

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.garbage.node.agent import Action, DirectoryOutcome
from controller.garbage.node.names import TRASH, Keep, KeepReason
from tests.integration.node import fuse
from tests.integration.node.disk import GRACE, HOUR, RETENTION, Agent, Disk, need_root, nested, snapshot, tmpfs, uid
from tests.integration.node.steps import Killed, Steps


def until_rest(disk: Disk, agent: Agent) -> None:
    """Sweep until all directories of deleted pods are removed. After each failure the agent waits for longer."""
    for _ in range(4):
        agent.sweep()
        disk.clocks.advance(HOUR)
    agent.sweep()


def test_after_a_kill_at_any_step_the_next_agent_finishes_everything(disk: Disk, steps: Steps) -> None:
    nested(disk, 1)
    alive = snapshot(nested(disk, 2))
    disk.pods.uids = {uid(2)}
    steps.taken = 0
    until_rest(disk, Agent(disk))
    total = steps.taken
    assert total > 8
    for point in range(total):
        nested(disk, 1)
        (disk.root / TRASH).rmdir()
        steps.stop(point, Killed())
        with pytest.raises(Killed):
            until_rest(disk, Agent(disk))
        steps.go_on()
        until_rest(disk, Agent(disk))
        assert (disk.names(), disk.trash()) == ({uid(2)}, set()), point
        assert snapshot(disk.root / uid(2)) == alive, point


def test_after_a_kill_at_any_step_of_a_move_the_directory_is_complete_if_its_pod_returns(
    disk: Disk, steps: Steps
) -> None:
    """A deleted pod can exist again after etcd was restored from a backup."""
    before = snapshot(nested(disk, 1))
    for point in range(4):
        steps.stop(point, Killed())
        with contextlib.suppress(Killed):
            Agent(disk).sweep_after_grace()
        steps.go_on()
        disk.pods.uids = {uid(1)}
        Agent(disk).sweep()
        assert snapshot(disk.root / uid(1)) == before, point
        disk.pods.uids = set()


FAULTS = [errno.EBUSY, errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO]


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_a_directory_that_cannot_be_moved_delays_no_other_and_is_retried(
    disk: Disk, agent: Agent, steps: Steps, number: int
) -> None:
    for each in (1, 2, 3):
        nested(disk, each)
    steps.fail(number, uid(2))
    said = agent.sweep_after_grace()
    assert said[uid(2)].keep == Keep(KeepReason.ERROR, os.strerror(number))
    assert disk.names() == {uid(2)}
    taken = steps.taken
    assert agent.sweep()[uid(2)].keep == said[uid(2)].keep
    assert steps.taken == taken + 1, "the agent lists only the trash, because it waits before it retries"
    steps.go_on()
    disk.clocks.advance(60)
    assert agent.sweep()[uid(2)].verdict is Action.MOVED


@pytest.mark.parametrize("dead", [True, False], ids=["has died", "does not answer"])
def test_a_mount_point_whose_file_system_fails_delays_no_other_directory(
    disk: Disk, agent: Agent, *, dead: bool
) -> None:
    need_root()
    nested(disk, 1)
    with fuse.mounted(nested(disk, 2), dead=dead):
        said = agent.sweep_after_grace()
        assert said[uid(2)].keep == Keep(KeepReason.MOUNT, uid(2))
        assert said[uid(1)].verdict is Action.MOVED
        assert disk.names() == {uid(2)}
    assert agent.reason(uid(2)) is None


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_a_directory_whose_age_cannot_be_read_delays_no_other(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for each in (1, 2, 3):
        nested(disk, each)
    plain = os.stat

    def fail(path: Any, **named: Any) -> os.stat_result:
        if path == uid(2):
            raise OSError(number, os.strerror(number))
        return plain(path, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fail)
        said = agent.sweep_after_grace()
    assert said[uid(2)].keep == Keep(KeepReason.ERROR, os.strerror(number))
    assert disk.names() == {uid(2)}
    assert agent.reason(uid(2)) is None


def test_sockets_that_vanish_while_the_root_is_read_delay_no_directory(disk: Disk) -> None:
    """For a socket the agent calls stat, which fails if the socket has vanished."""
    nested(disk, 1)
    for number in range(5):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
            bound.bind(str(disk.root / f"{number}.sock"))
    said = set()

    def report(outcome: DirectoryOutcome) -> None:
        said.add(outcome.path)
        for path in disk.root.glob("*.sock"):
            path.unlink()

    Agent(disk).run(report)
    assert uid(1) in said
    assert len(said) == 2, "one socket is reported before the sockets vanish"


class Unlisted:
    """A directory entry whose type is unknown (DT_UNKNOWN), and whose stat fails."""

    def __init__(self, entry: os.DirEntry[str], error: OSError) -> None:
        self.name = entry.name
        self.inode = entry.inode
        self._error = error

    def is_dir(self, *, follow_symlinks: bool) -> bool:
        assert not follow_symlinks
        raise self._error


@pytest.mark.parametrize("where", ["in the root", "inside"])
def test_an_entry_of_unknown_type_stays_and_delays_no_other(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    nested(disk, 1)
    nested(disk, 2)
    victim = uid(1) if where == "in the root" else "vcuda.config"
    plain = os.scandir

    @contextlib.contextmanager
    def scandir(fd: int) -> Iterator[Iterator[os.DirEntry[str] | Unlisted]]:
        hides = where == "in the root" or uid(1) in str(Path(f"/proc/self/fd/{fd}").readlink())
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        with plain(fd) as listing:
            yield (Unlisted(each, error) if hides and each.name == victim else each for each in listing)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        said = agent.sweep_after_grace()
    if where == "inside":
        assert said[uid(1)].keep == Keep(KeepReason.ERROR, "the type of vcuda.config cannot be read")
        assert disk.names() == {uid(1)}
    else:
        assert disk.names() == set(), "the agent tried to open the entry, and reported the error"


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
@pytest.mark.parametrize("victim", ["link", "vcuda.config", "file", "main", "cache"])
def test_a_file_that_cannot_be_deleted_delays_no_other_and_is_retried(
    disk: Disk, agent: Agent, steps: Steps, number: int, victim: str
) -> None:
    nested(disk, 1)
    (disk.root / uid(2)).mkdir()
    agent.sweep_after_grace()
    steps.fail(number, victim)
    agent.sweep()
    disk.clocks.advance(RETENTION)
    said = agent.sweep()
    [trashed] = disk.trash()
    assert said[f"{TRASH}/{trashed}"].keep == Keep(KeepReason.ERROR, os.strerror(number))
    left = {path.name for path in (disk.root / TRASH / trashed).rglob("*")}
    assert not left & ({"pids.config", "link", "vcuda.config"} - {victim}), "everything else was deleted"
    steps.go_on()
    disk.clocks.advance(HOUR)
    agent.sweep()
    assert disk.trash() == set()


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_without_a_trash_nothing_is_removed_and_everything_is_still_reported(
    disk: Disk, agent: Agent, steps: Steps, number: int
) -> None:
    nested(disk, 1)
    nested(disk, 2)
    disk.pods.uids = {uid(2)}
    steps.fail(number)
    said = agent.sweep_after_grace()
    assert said[uid(1)].keep == Keep(KeepReason.ERROR, f"{TRASH}: {os.strerror(number)}")
    assert said[uid(2)].keep == Keep(KeepReason.POD)
    assert disk.names() == {uid(1), uid(2)}


def test_a_directory_is_moved_on_a_file_system_without_exclusive_rename(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and kernels older than 3.15 have no rename that fails if the new name exists (RENAME_NOREPLACE)."""
    monkeypatch.setattr("controller.garbage.node.fs.renameat2", lambda *_: errno.EINVAL)
    nested(disk, 1)
    nested(disk, 2)
    agent.sweep_after_grace()
    disk.pods.uids = {uid(1), uid(2)}
    (disk.root / uid(1)).mkdir()
    inode = (disk.root / uid(1)).stat().st_ino
    agent.sweep()
    assert len(disk.trash()) == 1, "the name in the trash is in use"
    assert disk.names() == {uid(1), uid(2)}
    assert (disk.root / uid(1)).stat().st_ino == inode, "the move must not replace an empty directory"


def test_two_directories_of_one_name_are_not_moved_in_the_same_second(disk: Disk, agent: Agent) -> None:
    """The name in the trash ends with the time of the move in seconds, so the two names would be equal."""
    nested(disk, 1)
    agent.sweep_after_grace()
    wall = disk.clocks.wall
    nested(disk, 1)
    agent.sweep_after_grace()
    nested(disk, 1)
    agent.sweep()
    disk.clocks.advance(2 * GRACE)
    disk.clocks.wall = wall
    disk.age(disk.root / uid(1), HOUR)
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.ERROR, os.strerror(errno.EEXIST))
    disk.clocks.advance(60)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_a_read_only_file_system_keeps_everything_until_it_can_be_written(disk: Disk, agent: Agent) -> None:
    need_root()
    with tmpfs(disk.root, "size=1m"):
        nested(disk, 1)
        subprocess.run(("mount", "-o", "remount,ro", disk.root), check=True)
        assert agent.reason(uid(1)) is KeepReason.ERROR
        subprocess.run(("mount", "-o", "remount,rw", disk.root), check=True)
        assert agent.reason(uid(1)) is None


@pytest.mark.parametrize(("size", "pressure"), [("size=256k", 0.85), ("nr_inodes=20", 0.45)], ids=["blocks", "inodes"])
def test_a_file_system_without_free_blocks_or_inodes_is_emptied(disk: Disk, size: str, pressure: float) -> None:
    need_root()
    with tmpfs(disk.root, size):
        agent = Agent(disk, disk_pressure=pressure)
        path = nested(disk, 1)
        agent.sweep()
        if size == "size=256k":
            with pytest.raises(OSError, match="No space left"):
                shutil.copyfile("/dev/zero", path / "fill")
        agent.sweep_after_grace()
        agent.sweep_after_grace()
        assert (disk.names(), disk.trash()) == (set(), set())
