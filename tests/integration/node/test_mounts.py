"""Tests that the node agent never deletes a mount point, and never enters another mount."""

from contextlib import ExitStack

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.names import KeepReason
from tests.integration.node.disk import HOUR, Agent, Disk, bind_mount, need_root, tmpfs, uid

POD = f"vm/{uid(1)}"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("guarded", f"{POD}/main/mnt", id="inside, of the same file system: the same st_dev"),
        pytest.param("guarded/etc/passwd", f"{POD}/pids.config", id="a file that is a mount point"),
        pytest.param("guarded", POD, id="itself a mount point"),
    ],
)
def test_a_directory_that_is_or_contains_a_mount_point_stays(
    disk: Disk, agent: Agent, source: str, target: str
) -> None:
    need_root()
    (disk.make(uid(1)) / "main" / "mnt").mkdir()
    with bind_mount(disk.base / source, disk.base / target):
        assert agent.reason(uid(1)) is KeepReason.MOUNT
    disk.age(disk.root / uid(1), HOUR)
    assert agent.reason(uid(1)) is None


def test_a_mount_of_another_file_system_stays(disk: Disk, agent: Agent) -> None:
    need_root()
    path = disk.make(uid(1)) / "main" / "mnt"
    path.mkdir()
    with tmpfs(path, "size=1m"):
        (path / "theirs").touch()
        assert agent.reason(uid(1)) is KeepReason.MOUNT
        assert (path / "theirs").exists()


@pytest.mark.parametrize("char", ["\n", " ", "\\", "\x0b", "\x0c", "\r", "\x1c", "\x85", "\u2028", "\udc85"])
def test_a_mount_is_found_even_if_a_name_has_characters_that_could_end_a_line(
    disk: Disk, agent: Agent, char: str
) -> None:
    """The kernel escapes few characters in /proc/self/mountinfo, and users choose the names of files."""
    need_root()
    path = disk.make(uid(1)) / f"a{char}9 9 8:1 x"
    path.touch()
    with bind_mount(disk.guarded / "etc" / "passwd", path):
        assert agent.reason(uid(1)) is KeepReason.MOUNT


def test_names_that_might_end_a_line_do_not_hide_the_roots_own_mount(disk: Disk, agent: Agent) -> None:
    """A pod's author can choose these names by a subPath. In mountinfo, the pod's mount precedes the root's own."""
    need_root()
    source, target = disk.base / "sub\rpath", disk.base / "target"
    source.mkdir()
    target.mkdir()
    with bind_mount(source, target), tmpfs(disk.root, "size=1m"):
        disk.make(uid(1))
        assert agent.reason(uid(1)) is None


@pytest.mark.parametrize("where", ["", "x/y/z"], ids=["shallow", "deep"])
def test_a_mount_that_appears_after_the_mounts_were_read_is_not_entered(disk: Disk, agent: Agent, where: str) -> None:
    need_root()
    at = disk.make(uid(1)) / "main" / "mnt" / where
    at.mkdir(parents=True)
    agent.let_grace_pass()
    with ExitStack() as mounts:
        disk.pods.meanwhile = lambda: mounts.enter_context(bind_mount(disk.guarded, at))
        outcome = agent.sweep()[uid(1)]
        disk.pods.meanwhile = lambda: None
        assert outcome.keep is not None
        assert outcome.keep.reason is KeepReason.MOUNT
    disk.age(disk.root / uid(1), HOUR)
    assert agent.sweep()[uid(1)].verdict is Action.DELETED


def test_a_mount_beside_the_directory_keeps_only_its_own_directory(disk: Disk, agent: Agent) -> None:
    need_root()
    disk.make(uid(1))
    with bind_mount(disk.guarded, disk.make(uid(2))):
        assert agent.reason(uid(1)) is None
