"""Walks over directory trees and scans of mounts need few file descriptors and little memory."""

import os
from pathlib import Path

import pytest

from controller.garbage.node.fs import OpenDirectory, opened_root, walk
from controller.garbage.node.in_use import scan
from controller.garbage.node.names import KeepReason, MustStay
from tests.integration.node.disk import uid

DEEP = 500
MOUNTS = f"""\
20 1 8:1 / / rw - ext4 /dev/sda1 rw
21 20 0:30 / /var/lib/kubelet/pods/{uid(1)}/volumes/kubernetes.io~projected/token rw - tmpfs tmpfs rw
22 20 8:1 /data /var/lib/kubelet/pods/{uid(2)}/volume-subpaths/data/main/0 rw - ext4 /dev/sda1 rw
23 20 8:1 /var/lib/kubelet/pods/{uid(3)}/etc-hosts /etc/hosts rw - ext4 /dev/sda1 rw
24 20 8:1 /etc/gpu-manager/vm/{uid(4)} /etc/vcuda rw - ext4 /dev/sda1 rw
25 20 8:1 /etc/gpu-manager/vm/{uid(5)}//deleted /etc/vcuda rw - ext4 /dev/sda1 rw
26 20 0:31 / /etc/gpu-manager/vm/{uid(6)}/main rw - tmpfs tmpfs rw
"""


def descend(path: Path, levels: int) -> None:
    at = os.open(path, os.O_RDONLY)
    for level in range(levels):
        os.mkdir("beside", dir_fd=at)
        os.mkdir(f"{level:0100}", dir_fd=at)
        below = os.open(f"{level:0100}", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def names(root: OpenDirectory) -> list[str]:
    return [entry.name for _, entry in walk(root.fd, root.mount)]


def test_a_deep_walk_finds_everything_and_keeps_few_descriptors_open(tmp_path: Path) -> None:
    descend(tmp_path, DEEP)
    before = descriptors()
    with opened_root(tmp_path) as root:
        seen, most = 0, 0
        for _ in walk(root.fd, root.mount):
            seen += 1
            most = max(most, descriptors() - before)
    assert seen == 2 * DEEP
    assert most < 200
    assert descriptors() == before


def test_a_walk_that_ends_early_leaves_nothing_open(tmp_path: Path) -> None:
    descend(tmp_path, DEEP)
    before = descriptors()
    with opened_root(tmp_path) as root:
        steps = walk(root.fd, root.mount)
        for _ in range(DEEP):
            next(steps)
        del steps
    assert descriptors() == before


def test_a_tree_that_moves_during_a_walk_is_detected(tmp_path: Path) -> None:
    """A walk returns to the parent of a directory by "..". After a move of the tree, ".." is another directory."""
    (tmp_path / "tree").mkdir()
    descend(tmp_path / "tree", 100)
    (tmp_path / "elsewhere").mkdir()
    below = "/".join(f"{level:0100}" for level in range(20))
    with opened_root(tmp_path / "tree") as root:
        steps = walk(root.fd, root.mount)
        while next(steps)[1].name != f"{99:0100}":
            pass
        (tmp_path / "tree" / below).rename(tmp_path / "elsewhere" / "moved")
        with pytest.raises(MustStay) as refused:
            list(steps)
    assert refused.value.keep.reason is KeepReason.CHANGED


def test_a_tree_that_is_both_deep_and_wide_is_rejected_and_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.garbage.node.fs.MAX_PARKED", 10)
    descend(tmp_path, 100)
    with opened_root(tmp_path) as root:
        assert len(names(root)) == 200
        for number in range(20):
            (tmp_path / str(number)).mkdir()
        with pytest.raises(MustStay, match="over 10 entries"):
            names(root)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    process = tmp_path / "proc" / "self"
    (process / "ns").mkdir(parents=True)
    (process / "ns" / "mnt").symlink_to("mnt:[4026531841]")
    (process / "mountinfo").write_text(MOUNTS)
    return tmp_path / "proc"


def test_mounts_of_a_directory_count_and_kubelets_volumes_of_a_pod_do_not(tmp_path: Path, proc: Path) -> None:
    """A process that mounts the kubelet's directory keeps copies of pods' mounts long after the pods have ended."""
    with opened_root(tmp_path) as root:
        mounted = scan(root.mount, proc).mounted
    assert {number for number in range(1, 7) if uid(number) in mounted} == {3, 4, 5, 6}
