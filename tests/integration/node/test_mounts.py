"""Mounts in a root, of it, and beside it: nothing that is mounted anywhere goes, and no mount is crossed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.node.agent import Action
from controller.node.names import TRASH, KeepReason
from tests.integration.node.disk import RETENTION, Agent, Disk, bind_mount, need_root, tmpfs, uid


def test_a_mount_point_inside_keeps_the_directory(disk: Disk, agent: Agent) -> None:
    """A bind mount of the same file system, which has the same st_dev."""
    need_root()
    path = disk.make(uid(1))
    (path / "main" / "mnt").mkdir()
    with bind_mount(disk.guarded, path / "main" / "mnt"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT
    disk.clocks.advance(3600)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_a_file_that_is_a_mount_point_keeps_the_directory(disk: Disk, agent: Agent) -> None:
    need_root()
    path = disk.make(uid(1))
    with bind_mount(disk.guarded / "etc" / "passwd", path / "pids.config"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


def test_a_directory_that_is_itself_a_mount_point_stays(disk: Disk, agent: Agent) -> None:
    need_root()
    path = disk.make(uid(1))
    with bind_mount(disk.guarded, path):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


def test_a_directory_that_is_mounted_elsewhere_stays(disk: Disk, agent: Agent) -> None:
    """As into a container that outlived its pod."""
    need_root()
    path = disk.make(uid(1))
    (disk.base / "container").mkdir()
    with bind_mount(path, disk.base / "container"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


@contextmanager
def mounted_in_a_container(source: Path, target: Path) -> Iterator[None]:
    """Another process has the directory mounted, in a mount namespace of its own."""
    script = 'mount --bind "$0" "$1" && echo mounted && read line'
    command = ("unshare", "--mount", "sh", "-c", script, source, target)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            pytest.skip(f"unshare --mount needs CAP_SYS_ADMIN: {process.communicate()[1].strip()}")
        yield
        process.communicate()


def test_a_directory_that_a_container_has_mounted_stays(disk: Disk, agent: Agent) -> None:
    """Nothing in it need be open: the container may open it at any time."""
    need_root()
    path = disk.make(uid(1))
    (disk.base / "container").mkdir()
    with mounted_in_a_container(path, disk.base / "container"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT
    disk.clocks.advance(3600)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


@pytest.mark.parametrize("char", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028", "\udc85"])
def test_names_that_might_end_a_line_hide_no_mount(disk: Disk, agent: Agent, char: str) -> None:
    """The kernel escapes newlines alone, and anyone may give such a name to what is mounted into a container."""
    need_root()
    path = disk.make(uid(1))
    source = disk.base / f"volume{char}9 9 8:1 x"
    source.touch()
    with bind_mount(source, path / "pids.config"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


def test_names_that_might_end_a_line_do_not_hide_the_roots_own_mount(disk: Disk, agent: Agent) -> None:
    """As of a subPath, which its pod's author names: it is listed before a root that is mounted later."""
    need_root()
    source, target = disk.base / "sub\rpath", disk.base / "target"
    source.mkdir()
    target.mkdir()
    with bind_mount(source, target), tmpfs(disk.root, "size=1m"):
        disk.make(uid(1))
        assert agent.reason(uid(1)) is None


@pytest.mark.parametrize("where", ["shallow", "deep"])
def test_a_mount_that_appears_after_the_mounts_were_read_is_not_crossed(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    need_root()
    path = disk.make(uid(1))
    at = path / "main" / "mnt" / ("x/y/z" if where == "deep" else "")
    at.mkdir(parents=True)
    monkeypatch.setattr("controller.node.in_use.Scan.read_mounts", lambda *_: None)
    with bind_mount(disk.guarded, at):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


@pytest.mark.parametrize("where", ["shallow", "deep"])
def test_a_mount_that_appears_in_the_trash_is_not_crossed(disk: Disk, agent: Agent, where: str) -> None:
    need_root()
    path = disk.make(uid(1))
    (path / "main" / "mnt" / "x/y/z").mkdir(parents=True)
    agent.sweep_after_grace()
    [trashed] = disk.trash()
    at = disk.root / TRASH / trashed / "main" / "mnt" / ("x/y/z" if where == "deep" else "")
    with bind_mount(disk.guarded, at):
        disk.clocks.advance(RETENTION)
        agent.sweep()
        assert disk.trash() == {trashed}
    disk.clocks.advance(RETENTION)
    agent.sweep()
    assert disk.trash() == set()
