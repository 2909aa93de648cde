"""The node agent's root (the directory with one directory per pod) is on overlayfs, as on nodes that run from an image.

On overlayfs the kernel shows, for some files, the inode of the layer instead of the inode of the overlay.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.fs import opened_root
from controller.garbage.node.in_use import scan
from controller.garbage.node.names import KeepReason
from tests.integration.node.disk import HOUR, Agent, Disk, mounted, need_root, tmpfs, uid
from tests.integration.node.test_attacks import held


@pytest.fixture(params=["several file systems", "several file systems, xino=auto", "one file system"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    """A disk on overlayfs. If the layers are on several file systems, readdir and stat show different inodes."""
    need_root()
    lower, upper, merged = (tmp_path / name for name in ("lower", "upper", "merged"))
    for path in (lower, upper, merged):
        path.mkdir()
    with ExitStack() as stack:
        stack.enter_context(tmpfs(upper, "size=10m"))
        if request.param == "one file system":
            lower = upper / "lower"
            lower.mkdir()
        else:
            stack.enter_context(tmpfs(lower, "size=1m"))
        for name in ("changes", "work"):
            (upper / name).mkdir()
        options = f"lowerdir={lower},upperdir={upper / 'changes'},workdir={upper / 'work'}"
        options += ",xino=auto" if "xino" in request.param else ""
        stack.enter_context(mounted(merged, "-t", "overlay", "-o", options, "none"))
        disk = Disk(merged)
        disk.furnish()
        with disk.untouched():
            yield disk


def test_the_directory_of_a_deleted_pod_is_removed(disk: Disk, agent: Agent) -> None:
    disk.make(uid(1))
    disk.make(uid(2))
    disk.pods.uids = {uid(2)}
    agent.sweep_to_the_end()
    assert (disk.names(), disk.trash()) == ({uid(2)}, set())


@pytest.mark.parametrize("how", ["file", "map", "directory", "cwd"])
def test_a_directory_that_another_process_uses_stays(disk: Disk, agent: Agent, how: str) -> None:
    path = disk.make(uid(1))
    with held(path, how):
        assert agent.reason(uid(1)) is KeepReason.OPEN
    disk.clocks.advance(HOUR)
    assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_a_mapped_file_is_also_found_by_its_path(disk: Disk, tmp_path: Path) -> None:
    """Before Linux 6.8, /proc/PID/maps shows the device and inode of the layer's file, which stat does not show."""
    process = tmp_path / "proc" / "7"
    (process / "ns").mkdir(parents=True)
    (process / "ns" / "mnt").symlink_to("mnt:[4026531841]")
    (process / "fd").mkdir()
    (process / "mountinfo").touch()
    line = f"7f0000000000-7f0000001000 rw-s 00000000 00:fe 4711                 /etc/vm/{uid(1)}/main/vcuda.config\n"
    (process / "maps").write_text(line)
    (tmp_path / "proc" / "self").symlink_to("7")
    with opened_root(disk.root) as root:
        assert uid(1) in scan(root.mount, tmp_path / "proc").named
    with opened_root(tmp_path) as plain:
        assert scan(plain.mount, tmp_path / "proc").named == set()
