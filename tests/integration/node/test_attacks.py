"""Tests that no tenant can make the node agent delete files outside its root, or use much memory or many descriptors.

The root has one directory per pod. The fixture `disk` compares a tree outside the root before and after each test.
"""

import os
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from controller.garbage.node import fs
from controller.garbage.node.agent import Action
from controller.garbage.node.names import Keep, KeepReason
from tests.integration.node.disk import HOUR, Agent, Disk, need_root, snapshot, uid
from tests.rendered import MANIFESTS

DEEP = 3000
LONG = 250
MANY = 60_000  # ext4 allows 65,000 links of one file
BOUNDED = 2 * 2**20
CONTAINER_USER = 1000


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda path: path.symlink_to("../guarded/etc"), KeepReason.LINK, id="a link"),
        pytest.param(lambda path: path.symlink_to("nowhere"), KeepReason.LINK, id="a dangling link"),
        pytest.param(os.mkfifo, KeepReason.NOT_A_DIRECTORY, id="a FIFO"),
        pytest.param(Path.touch, KeepReason.NOT_A_DIRECTORY, id="a file"),
    ],
)
def test_a_file_or_link_with_the_name_of_a_pod_stays(
    disk: Disk, agent: Agent, make: Callable[[Path], None], reason: KeepReason
) -> None:
    make(disk.root / uid(1))
    before = snapshot(disk.root)
    assert agent.reason(uid(1)) is reason
    assert snapshot(disk.root) == before


@pytest.mark.parametrize(
    "name", [f"{uid(1)}..", f"..{uid(1)}", "...", f"{uid(1)} ", "\udcff\udcfe", "\x1b[2J", "a" * 255, f".{uid(1)}"]
)
def test_directories_with_other_names_stay(disk: Disk, agent: Agent, name: str) -> None:
    path = disk.make(name)
    before = snapshot(path)
    assert agent.reason(name) is KeepReason.FOREIGN
    assert snapshot(path) == before


def links(path: Path) -> None:
    (path / "etc").symlink_to(path.parents[1] / "guarded" / "etc")
    (path / "main" / "up").symlink_to("../../../guarded")
    (path / "itself").symlink_to(".")


def a_fifo_and_a_socket(path: Path) -> None:
    os.mkfifo(path / "fifo")
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path / "vcuda.sock"))


def names_of_every_kind_of_byte(path: Path) -> None:
    for name in ("\udcff\udcfe", "new\nline", "\x1b[2J", "-rf", "~0", " ", "a" * 255):
        (path / name / "~0").mkdir(parents=True)
        (path / name / "~1").touch()


def a_path_of_many_thousand_bytes(path: Path) -> None:
    """Create a file whose path is longer than PATH_MAX (4,096 bytes), so no call can open it by its path."""
    at = os.open(path, os.O_RDONLY)
    for level in range(DEEP):
        name = f"{level:0{LONG}}"
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("bottom", os.O_CREAT, dir_fd=at))
    os.close(at)


@pytest.mark.parametrize(
    "fill", [links, a_fifo_and_a_socket, names_of_every_kind_of_byte, a_path_of_many_thousand_bytes]
)
def test_everything_in_a_directory_is_deleted_and_no_link_is_followed(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, fill: Callable[[Path], None]
) -> None:
    path = disk.make(uid(1))
    fill(path)
    disk.age(path, HOUR)
    before, most, plain = descriptors(), 0, os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        nonlocal most
        most = max(most, descriptors() - before)
        plain(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    assert agent.reason(uid(1)) is None
    assert (most < 200, descriptors()) == (True, before)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_with_a_hard_link_outside_keeps_its_other_name(disk: Disk, agent: Agent) -> None:
    outside = disk.base / "outside"
    outside.write_bytes(bytes(1_000_000))
    os.link(outside, disk.make(uid(1)) / "inside")
    disk.age(disk.root / uid(1), HOUR)
    freed = agent.sweep_after_grace()[uid(1)].freed
    assert (disk.names(), outside.stat().st_size) == (set(), 1_000_000)
    assert freed < 1_000_000, "a file with a second hard link frees no space"


def test_a_directory_replaced_after_it_was_listed_stays(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))

    def exchange() -> None:
        path.rename(disk.base / "listed")
        disk.make(uid(1), age=0)

    agent.let_grace_pass()
    disk.pods.meanwhile = exchange
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.CHANGED)
    assert (disk.root / uid(1) / "main" / "vcuda.config").exists()
    assert (disk.base / "listed" / "main" / "vcuda.config").exists()


def test_a_link_in_place_of_a_listed_directory_is_not_followed(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))

    def exchange() -> None:
        path.rename(disk.base / "listed")
        path.symlink_to(disk.guarded)

    agent.let_grace_pass()
    disk.pods.meanwhile = exchange
    assert agent.sweep()[uid(1)].keep == Keep(KeepReason.ERROR, "Not a directory")
    assert path.is_symlink()


@pytest.mark.parametrize("with_what", ["link", "directory", "empty directory"])
@pytest.mark.parametrize("swapped", [uid(1), "main"], ids=["top", "inside"])
def test_a_path_swapped_during_the_deletion_loses_nothing(
    disk: Disk, agent: Agent, monkeypatch: pytest.MonkeyPatch, swapped: str, with_what: str
) -> None:
    """The agent deletes the directory that it has checked, whatever name the directory has now."""
    path = disk.make(uid(1))
    victim = path if swapped == uid(1) else path / swapped
    plain = os.unlink

    def unlink(name: str, *, dir_fd: int) -> None:
        plain(name, dir_fd=dir_fd)
        if name == "vcuda.config":
            victim.rename(disk.base / "swapped")
            if with_what == "link":
                victim.symlink_to(disk.guarded)
            else:
                victim.mkdir()
            if with_what == "directory":
                (victim / "theirs").touch()

    agent.let_grace_pass()
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", unlink)
        outcome = agent.sweep().get(uid(1))
    assert not list((disk.base / "swapped").rglob("vcuda.config")), "the checked directory is emptied"
    if swapped == uid(1):
        assert outcome is not None
        assert outcome.keep == Keep(KeepReason.CHANGED)
        assert path.is_symlink() or path.is_dir()
    assert with_what != "directory" or (victim / "theirs").exists()


@pytest.mark.slow
def test_a_directory_of_very_many_files_is_deleted_in_little_memory(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))
    directory = os.open(path / "main", os.O_RDONLY)
    for number in range(MANY):
        os.link("vcuda.config", str(number), src_dir_fd=directory, dst_dir_fd=directory)
        if number % 10_000 == 0:
            os.symlink("vcuda.config", f"link{number}", dir_fd=directory)
    os.close(directory)
    disk.age(path, HOUR)
    agent.let_grace_pass()
    tracemalloc.start()
    try:
        assert agent.sweep()[uid(1)].verdict is Action.DELETED
        assert tracemalloc.get_traced_memory()[1] < BOUNDED
    finally:
        tracemalloc.stop()


REMOVE = """
import sys
from pathlib import Path
from controller.garbage.node.fs import TreeRemoval, opened, opened_root
with opened_root(Path(sys.argv[1])) as root, opened(root, sys.argv[2]) as top:
    TreeRemoval(root, lambda: False).remove(sys.argv[2], top)
"""


def capabilities() -> list[str]:
    spec = yaml.safe_load((MANIFESTS / "node-agent/common/daemon-set.yaml").read_text())["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    return [f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(0o700, id="for its owner alone"),
        pytest.param(0o500, id="not to be written"),
        pytest.param(0o1777, id="sticky: only an owner deletes there"),
    ],
)
def test_the_capabilities_of_the_manifest_suffice_for_files_of_a_containers_own_user(disk: Disk, mode: int) -> None:
    need_root()
    path = disk.make(uid(1))
    inner = path / "main" / "tmp"
    inner.mkdir()
    (inner / "file").touch()
    inner.chmod(mode)
    for each in (path, *path.rglob("*")):
        os.chown(each, CONTAINER_USER, CONTAINER_USER)
    bounded = f"--bounding-set={','.join(('-all', *capabilities()))}"
    command = ("setpriv", bounded, "--", sys.executable, "-c", REMOVE, disk.root, uid(1))
    subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert disk.names() == set()


def test_a_deep_directory_is_moved_up_only_within_the_deleted_directory(disk: Disk, agent: Agent) -> None:
    path = disk.make(uid(1))
    deep = path.joinpath(*(str(level) for level in range(fs.MAX_OPEN + 2)))
    (deep / "file").mkdir(parents=True)
    disk.make(uid(2))
    disk.pods.uids = {uid(2)}
    before = snapshot(disk.root / uid(2))
    disk.age(path, HOUR)
    assert agent.reason(uid(1)) is None
    assert snapshot(disk.root / uid(2)) == before
    assert disk.names() == {uid(2)}
