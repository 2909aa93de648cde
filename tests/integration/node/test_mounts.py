"""The node agent never removes a mounted directory, and never enters another file system."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from controller.garbage.node.names import TRASH, KeepReason
from tests.integration.node.disk import HOUR, RETENTION, Agent, Disk, bind_mount, need_root, tmpfs, uid


@contextmanager
def mounted_in_a_container(source: Path, target: Path) -> Iterator[None]:
    script = 'mount --bind "$0" "$1" && echo mounted && read line'
    command = ("unshare", "--mount", "sh", "-c", script, source, target)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            pytest.skip(f"unshare --mount needs CAP_SYS_ADMIN: {process.communicate()[1].strip()}")
        yield
        process.communicate()


POD = f"vm/{uid(1)}"


@pytest.mark.parametrize(
    ("mount", "source", "target"),
    [
        pytest.param(bind_mount, "guarded", f"{POD}/main/mnt", id="inside, of the same file system: the same st_dev"),
        pytest.param(bind_mount, "guarded/etc/passwd", f"{POD}/pids.config", id="a file that is a mount point"),
        pytest.param(bind_mount, "guarded", POD, id="itself a mount point"),
        pytest.param(bind_mount, POD, "container", id="mounted elsewhere"),
        pytest.param(
            mounted_in_a_container, POD, "container", id="mounted in a container, which may open files at any time"
        ),
    ],
)
def test_a_directory_stays_while_it_is_mounted(
    disk: Disk, agent: Agent, mount: Callable[[Path, Path], AbstractContextManager[None]], source: str, target: str
) -> None:
    need_root()
    (disk.make(uid(1)) / "main" / "mnt").mkdir()
    (disk.base / "container").mkdir()
    with mount(disk.base / source, disk.base / target):
        assert agent.reason(uid(1)) is KeepReason.MOUNT
    disk.clocks.advance(HOUR)
    agent.sweep_after_grace()
    assert disk.names() == set()


@pytest.mark.parametrize("char", ["\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028", "\udc85"])
def test_a_mount_is_found_even_if_a_name_has_characters_that_could_end_a_line(
    disk: Disk, agent: Agent, char: str
) -> None:
    """In /proc/PID/mountinfo the kernel escapes only newlines, and users choose the names of volumes."""
    need_root()
    path = disk.make(uid(1))
    source = disk.base / f"volume{char}9 9 8:1 x"
    source.touch()
    with bind_mount(source, path / "pids.config"):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


def test_names_that_might_end_a_line_do_not_hide_the_roots_own_mount(disk: Disk, agent: Agent) -> None:
    """A pod's author can choose such a name by a subPath. mountinfo shows this mount before the root's own mount."""
    need_root()
    source, target = disk.base / "sub\rpath", disk.base / "target"
    source.mkdir()
    target.mkdir()
    with bind_mount(source, target), tmpfs(disk.root, "size=1m"):
        disk.make(uid(1))
        assert agent.reason(uid(1)) is None


@pytest.mark.parametrize("where", ["", "x/y/z"], ids=["shallow", "deep"])
def test_a_mount_that_appears_after_the_mounts_were_read_is_not_crossed(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    need_root()
    at = disk.make(uid(1)) / "main" / "mnt" / where
    at.mkdir(parents=True)
    monkeypatch.setattr("controller.garbage.node.in_use.Scan.read_mounts", lambda *_: None)
    with bind_mount(disk.guarded, at):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


@pytest.mark.parametrize("where", ["", "x/y/z"], ids=["shallow", "deep"])
def test_a_mount_that_appears_in_the_trash_is_not_crossed(disk: Disk, agent: Agent, where: str) -> None:
    need_root()
    (disk.make(uid(1)) / "main" / "mnt" / where).mkdir(parents=True)
    agent.sweep_after_grace()
    [trashed] = disk.trash()
    with bind_mount(disk.guarded, disk.root / TRASH / trashed / "main" / "mnt" / where):
        disk.clocks.advance(RETENTION)
        agent.sweep()
        assert disk.trash() == {trashed}
    disk.clocks.advance(RETENTION)
    agent.sweep()
    assert disk.trash() == set()
