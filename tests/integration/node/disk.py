"""Helpers for tests of the node agent: the disk, clocks and pods of a node, and an agent that sweeps the disk.

A sweep is one pass of the agent over the root. The root has one directory per pod, which is called vm directory.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controller.garbage.node.age import Now, ObservedAge
from controller.garbage.node.agent import Action, DirectoryOutcome, Report
from controller.garbage.node.fs import OutOfTime
from controller.garbage.node.names import VM_DIRECTORIES, Keep, KeepReason
from controller.garbage.node.pods import Evidence, PodListing
from controller.garbage.node.sweep import NodeSweep
from vcuda.errors import VcudaError

GRACE = 300.0
HOUR = 3600.0
OWN = "00000000-0000-4000-8000-0000000000ff"
"""The uid of the node agent's own pod."""

Snapshot = dict[str, tuple[object, ...]]


def uid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def snapshot(path: Path) -> Snapshot:
    """Return modes, owners, times, links and contents of all files of a tree, to compare two snapshots."""
    found: Snapshot = {}
    for directory, names, files in os.walk(path):
        for name in (".", *names, *files):
            at = Path(directory, name)
            about = at.lstat()
            held = at.readlink() if at.is_symlink() else at.read_bytes() if at.is_file() else None
            facts = (about.st_ino, about.st_mode, about.st_uid, about.st_gid, about.st_nlink, about.st_mtime_ns)
            found[str(at.relative_to(path))] = (*facts, held)
    return found


@dataclass
class Clocks:
    """The monotonic clock and the wall clock of the node agent's machine. Tests set both."""

    wall: float = field(default_factory=time.time)
    steady: float = 1000.0

    def __call__(self) -> Now:
        return Now(self.wall, self.steady)

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@dataclass
class Pods:
    """The pods of the node, except the node agent's own pod.

    ``uids``: the pods in the API server's cache. ``live``: the pods in a consistent LIST, by default those of the
    cache. ``statics``: the static pods, from the annotations of their mirror pods; True if the static pod may have
    cards. ``own``: the uid of the agent's own pod, which is in every list.
    """

    uids: set[str] = field(default_factory=set)
    live: set[str] | None = None
    statics: Mapping[str, bool] = field(default_factory=dict)
    own: str = OWN
    error: VcudaError | None = None
    live_error: VcudaError | None = None
    # The agent's last LIST calls this function. A test can set it to change the node in the middle of a sweep.
    meanwhile: Callable[[], object] = lambda: None

    def __call__(self, live: bool) -> PodListing:
        if live:
            self.meanwhile()
        error = self.live_error if live else self.error
        if error:
            raise error
        uids = self.live if live and self.live is not None else self.uids
        return PodListing(frozenset({self.own, *uids}), self.statics)


@dataclass
class Disk:
    """The disk of a node.

    ``root``: the directory that has the vm directories.
    ``guarded``: a tree next to the root, which no sweep may change.
    """

    base: Path
    scheme: str = "gpu-manager"
    pods: Pods = field(default_factory=Pods)
    clocks: Clocks = field(default_factory=Clocks)

    def furnish(self) -> None:
        self.root.mkdir()
        (self.kubelet / OWN).mkdir(parents=True)
        (self.guarded / "etc").mkdir(parents=True)
        (self.guarded / "etc" / "passwd").write_text("root:x:0:0\n")
        (self.guarded / "link").symlink_to("etc")

    @property
    def root(self) -> Path:
        return self.base / "vm"

    @property
    def kubelet(self) -> Path:
        """kubelet's directory of pods."""
        return self.base / "pods"

    @property
    def guarded(self) -> Path:
        return self.base / "guarded"

    def make(self, name: str, age: float = HOUR) -> Path:
        """Create the vm directory of a pod, as gpu-manager does. It was last modified ``age`` seconds ago."""
        path = self.root / name
        (path / "main").mkdir(parents=True)
        (path / "main" / "vcuda.config").write_bytes(bytes(5000))
        (path / "pids.config").write_text("7\n")
        self.age(path, age)
        return path

    def age(self, path: Path, seconds: float) -> None:
        stamp = self.clocks.wall - seconds
        os.utime(path, (stamp, stamp), follow_symlinks=False)

    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir()}

    @contextmanager
    def untouched(self) -> Iterator[None]:
        before = snapshot(self.guarded)
        yield
        assert snapshot(self.guarded) == before


class Agent:
    """Sweeps a disk like the real node agent. Each `Agent` only remembers its own earlier sweeps."""

    def __init__(self, disk: Disk, *, dry_run: bool = False) -> None:
        self.disk = disk
        evidence = Evidence(disk.pods, disk.kubelet, OWN)
        form = VM_DIRECTORIES[disk.scheme]
        self._sweep = NodeSweep(disk.root, form, evidence, ObservedAge(GRACE), dry_run, disk.clocks)
        self.blocked: Keep | None = None

    def sweep(
        self, give_up: Callable[[], bool] = lambda: False, stopping: Callable[[], bool] = lambda: False
    ) -> dict[str, DirectoryOutcome]:
        said: list[DirectoryOutcome] = []
        self.run(said.append, give_up, stopping)
        return {outcome.path: outcome for outcome in said}

    def run(
        self, report: Report, give_up: Callable[[], bool] = lambda: False, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        with suppress(OutOfTime):
            self.blocked = self._sweep.run(report, give_up, stopping)

    def let_grace_pass(self) -> None:
        """Sweep once, which begins the grace period of each directory, and let this period pass."""
        self.sweep()
        self.disk.clocks.advance(2 * GRACE)

    def sweep_after_grace(self) -> dict[str, DirectoryOutcome]:
        self.let_grace_pass()
        return self.sweep()

    def reason(self, name: str) -> KeepReason | None:
        """Return why the directory is kept after the grace period. None if it is deleted."""
        outcome = self.sweep_after_grace()[name]
        assert (outcome.verdict is Action.KEPT) == (outcome.keep is not None)
        assert (name in self.disk.names()) == (outcome.keep is not None)
        return outcome.keep.reason if outcome.keep else None


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


@contextmanager
def mounted(at: Path, *arguments: str | Path) -> Iterator[None]:
    """Run mount(8) with these arguments and the mount point ``at``. Skip the test if mounts are not permitted."""
    done = subprocess.run(("mount", *arguments, at), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here, which takes CAP_SYS_ADMIN: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(("umount", at), check=True)


def bind_mount(source: Path, target: Path) -> AbstractContextManager[None]:
    return mounted(target, "--bind", source)


def tmpfs(path: Path, options: str) -> AbstractContextManager[None]:
    return mounted(path, "-t", "tmpfs", "-o", options, "none")


def nested(disk: Disk, number: int) -> Path:
    path = disk.make(uid(number))
    (path / "main" / "cache" / "deep").mkdir(parents=True)
    (path / "main" / "cache" / "deep" / "file").touch()
    (path / "link").symlink_to(disk.guarded)
    disk.age(path, HOUR)
    return path
