"""Finds directories that a process uses: by an open or mapped file, by a mount, or by a socket on which it listens.

Files are identified by device and inode, because the meaning of a path depends on the mount namespace. /proc shows the
files of other users' processes only with CAP_SYS_PTRACE (proc(5)). It shows processes outside the container only with
hostPID.

A process may have files open on a server that does not answer (NFS, FUSE). A stat of such a file would hang. So the
mount of each file is looked up first. A stat is made only if the mount is unknown, or has the file system of the root
(the directory with the pods' directories).
"""

import contextlib
import errno
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from controller.garbage.node.fs import (
    Identity,
    Mount,
    OutOfTime,
    identity_at,
    identity_of,
    mount_number,
    walk,
)
from controller.garbage.node.names import FileKind, KeepReason, MustStay

# Mounts of pod volumes do not show that a pod runs: a process that bind-mounts kubelet's directory keeps copies of them
# long after the pod has ended. A running container is found by its mount of the pod's etc-hosts file.
_VOLUMES = re.compile(r"/pods/[^/]+/(?:volumes|volume-subpaths|plugins)(?:/.*)?$")
_MOUNT = re.compile("([0-9]+) [0-9]+ ([0-9]+):([0-9]+) ([^ ]*) ([^ ]*) .*? - ([^ ]*) ", re.DOTALL)
_PATH = re.compile(rb" (/.*)$", re.MULTILINE)
_STACKED = ("overlay", "aufs")
_OWN_MOUNTS = Path("/proc/self/mountinfo")
_GONE = (errno.ENOENT, errno.ESRCH, errno.EINVAL)  # /proc returns these errors if the process has ended or is ending.
_STALE = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EIO)
"""The errors of opening a directory in /proc if the thread has ended, or if a file server does not answer."""
_HOST_THREAD = "kthreadd"  # On the host, process 2 is kthreadd. A pod sees kthreadd only if it has hostPID.

Device = tuple[int, int]  # the major and the minor number


class _Mounted(NamedTuple):
    """One mount, read from a line of mountinfo. Its paths are escaped as in mountinfo.

    ``number``: the mount id.
    ``device``: the device of the file system.
    ``root``: the mounted path within the file system.
    ``point``: the mount point.
    ``kind``: the type of the file system.
    """

    number: int
    device: Device
    root: str
    point: str
    kind: str


@dataclass
class InUse:
    """The files and mounts that the processes of a node use.

    ``files``: open files, and working and root directories.
    ``mapped``: the inodes of mapped files on the file system of the root (the directory with the pods' directories).
    ``named``: the components of the paths of mapped files, if the root is on a stacked file system (such as overlay).
    ``mounted``: the components of the paths of mount points and of mounted directories.
    ``unseen``: the ids of processes that could not be inspected.
    """

    files: set[Identity] = field(default_factory=set)
    mapped: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    mounted: set[str] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)

    def holds(self, file: Identity) -> bool:
        return file in self.files or file.inode in self.mapped


def scan(mount: Mount, proc: Path = Path("/proc"), moved: Callable[[], None] = lambda: None) -> InUse:
    """Return the files and mounts that other processes use. Files outside the file system of ``mount`` are left out.

    ``mount``: the mount of the root (the directory with the pods' directories). ``moved``: called for each process,
    thread and open file, to report progress.
    """
    scan_run = Scan(_find_mounted(mount), moved)
    scan_run.read_mounts(proc / "self")
    names = os.listdir(proc)  # noqa: PTH208  # Creating a Path object for each process would be slow.
    processes = [proc / name for name in names if name.isdigit() and int(name) != os.getpid()]
    # Read the mounts of all processes before any file, because the mount decides whether a stat of the file is safe.
    # The mount of a file may be visible only to a process that is scanned later.
    for process in processes:
        moved()
        with contextlib.suppress(OSError):  # An error is ignored, because `at_process` reads the mounts again.
            scan_run.read_mounts(process)
    for process in processes:
        scan_run.at_process(process)
    return scan_run.found


@dataclass
class Scan:
    """A scan of the open files and mounts of all processes, while it runs.

    ``home``: the mount of the root (the directory with the pods' directories).
    ``moved``: called at each step, to report progress.
    ``found``: the result so far.
    ``namespaces``: the mount namespaces that were read.
    ``mounts``: the device of each known mount, by mount id.
    """

    home: _Mounted
    moved: Callable[[], None]
    found: InUse = field(default_factory=InUse)
    namespaces: set[str] = field(default_factory=set)
    mounts: dict[int, Device] = field(default_factory=dict)

    def at_process(self, process: Path) -> None:
        """Record the files of a process. /proc shows them for its first thread or, if that has ended, for the others.

        A process may continue after its first thread has ended (pthread_exit(3), "Notes").
        """
        if self._at_thread(process):
            return
        threads: list[str] = []  # `threads` stays empty if the process has ended meanwhile.
        with contextlib.suppress(OSError):
            threads = os.listdir(process / "task")  # noqa: PTH208  # Path objects for all threads would be slow.
        others = [self._at_thread(process / "task" / name) for name in threads if name != process.name]
        if others and not any(others):
            self.found.unseen.append(process.name)

    def _at_thread(self, thread: Path) -> bool:
        # Record the files of a thread. Return False if the thread has ended meanwhile. An ending thread frees its
        # memory before it closes its files (do_exit in Linux' kernel/exit.c). So if its memory maps, which are read
        # last, are not empty, all its open files were found.
        self.moved()
        try:
            self.read_mounts(thread)
            for number in os.listdir(f"{thread}/fd"):  # noqa: PTH208  # Path objects for all files would be slow.
                self._add_open(f"{thread}/fd/{number}", f"{thread}/fdinfo/{number}")
                self.moved()
            self._add_directory(f"{thread}/cwd")
            self._add_directory(f"{thread}/root")
            maps = (thread / "maps").read_bytes()
        except PermissionError:
            self.found.unseen.append(thread.name)
            return True
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        self._add_mapped(maps)
        return bool(maps)

    def _add_mapped(self, maps: bytes) -> None:
        # Record mapped files on the file system of the root, which has the pods' directories. For a stacked file system
        # such as overlay, kernels before 6.8 show inodes of the lower layer, so paths are recorded, too.
        self.found.mapped.update(map(int, re.findall(rb" %02x:%02x (\d+) " % self.home.device, maps)))
        if self.home.kind in _STACKED:
            for path in set(_PATH.findall(maps)):
                self.found.named.update(os.fsdecode(path).split("/"))

    def _add_open(self, link: str, info: str) -> None:
        # Record an open file, unless the process has closed it meanwhile. Raises PermissionError if access is denied.
        with contextlib.suppress(FileNotFoundError):
            if _has_path(link):
                self._add(mount_number(info), lambda: os.stat(link))  # noqa: PTH116  # os.stat is faster than pathlib.

    def _add_directory(self, link: str) -> None:
        # Record the working or root directory of a process. Open it, because /proc shows mount ids only for open files.
        try:
            fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _STALE:
                return
            raise
        try:
            self._add(mount_number(f"/proc/self/fdinfo/{fd}"), lambda: os.fstat(fd))
        finally:
            os.close(fd)

    def _add(self, mount: int, ask: Callable[[], os.stat_result]) -> None:
        # Record a file, unless it is on another file system than the pods' directories. If `stat` fails on the file
        # system of the pods' directories, raise the error. If it fails on an unknown mount, ignore the error, because
        # the file server of this mount is probably dead.
        known = self.mounts.get(mount)
        if known not in (None, self.home.device):
            return
        try:
            held = ask()
        except OSError:
            if known:
                raise
            return
        self.found.files.add(Identity(held.st_dev, held.st_ino))

    def read_mounts(self, process: Path) -> None:
        """Read the mounts of a process, unless its mount namespace was read before (proc_pid_mountinfo(5))."""
        namespace = str((process / "ns" / "mnt").readlink())
        if namespace in self.namespaces:
            return
        mounts = _mounts_in(process / "mountinfo")
        self.namespaces.add(namespace)
        for found in mounts:
            self.mounts[found.number] = found.device
            for path in (found.root, found.point):
                self.found.mounted.update(_VOLUMES.sub("", path).split("/"))


def _has_path(link: str) -> bool:
    # Return True if a link in /proc/PID/fd refers to a file, and False if it refers to a pipe or a socket.
    try:
        return os.readlink(link).startswith("/")  # noqa: PTH115  # os.readlink is faster than pathlib
    except (PermissionError, FileNotFoundError):
        raise
    except OSError:
        return True  # Only the path of a file can be too long for readlink. The link of a pipe or socket is short.


def _find_mounted(mount: Mount) -> _Mounted:
    # Read the mount of the pods' directories from mountinfo, because /proc/PID/maps shows the device number of
    # mountinfo. On btrfs, stat returns a different device number.
    for found in _mounts_in(_OWN_MOUNTS):
        if found.number == mount.number:
            return found
    raise MustStay(KeepReason.ERROR, f"the mount {mount.number} of the pods' directories is not in {_OWN_MOUNTS}")


def mount_points() -> frozenset[str]:
    """Return the last path component of every mount point in this process's mount namespace."""
    return frozenset(found.point.rpartition("/")[2] for found in _mounts_in(_OWN_MOUNTS))


def _mounts_in(path: Path) -> list[_Mounted]:
    # The kernel escapes newlines in the paths of mountinfo, but no other line separators. So the file is split at
    # newlines only. Lines of an unknown form are skipped.
    matches = map(_MOUNT.match, os.fsdecode(path.read_bytes()).split("\n"))
    return [_Mounted(int(each[1]), (int(each[2]), int(each[3])), *each.group(4, 5, 6)) for each in matches if each]


def sees_host() -> bool:
    """Return whether /proc shows the processes of the host, and not only those of the container."""
    try:
        return Path("/proc/2/comm").read_text().strip() == _HOST_THREAD
    except OSError:
        return False


def check_unused(fd: int, mount: Mount, in_use: InUse, stopping: Callable[[], bool], own_socket: str = "") -> None:
    """Raise MustStay if an open directory, or an entry at any depth in it, is in use or a mount point.

    ``own_socket``: the name of the socket on which the vendor's device plugin listens, in the directory or one level
    below. This listener does not count as a use. Raises OutOfTime if ``stopping`` returns True, because the check of
    millions of files takes long.
    """
    if in_use.holds(identity_of(fd)):
        raise MustStay(KeepReason.OPEN, "the directory itself is in use")
    for parent, entry in walk(fd, mount):
        if stopping():
            raise OutOfTime
        if _is_held(entry.name, parent, in_use):
            raise MustStay(KeepReason.OPEN, entry.name)
        is_own = entry.name == own_socket and identity_of(fd) in (identity_of(parent), identity_at("..", parent))
        if entry.kind is FileKind.SOCKET and not is_own and listens(parent, entry.name):
            raise MustStay(KeepReason.LISTENING, entry.name)


def _is_held(name: str, parent: int, in_use: InUse) -> bool:
    # Read the inode from the file itself, because the directory listing may show another inode for the file.
    try:
        return in_use.holds(identity_at(name, parent))
    except FileNotFoundError:
        return False  # Another process has removed the file.


def listens(parent: int, name: str) -> bool:
    """Return whether a process listens on the Unix socket ``name`` in a directory.

    The function tries to connect, because the kernel then finds a listener in any network namespace, by inode
    (unix(7)). /proc/net/unix has only listeners in the reader's own namespace, by their path at the time of the bind.
    The listener gets one connection, which is closed immediately.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise MustStay(KeepReason.CHANGED, name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as client:
            client.connect(f"/proc/self/fd/{fd}")
    except ConnectionRefusedError:
        return False
    except (PermissionError, FileNotFoundError):
        raise
    except OSError:
        return True  # A process listens, but its queue is full (EAGAIN), or it uses another socket type (EPROTOTYPE).
    finally:
        os.close(fd)
    return True


# A scan of all processes fails if it makes no progress for this many seconds. The whole scan may take longer: usually
# about a second for a thousand processes, but one process can have millions of open files.
SCAN_TIMEOUT_SECONDS = 120.0

STEP_SECONDS = 0.2  # While a scan runs, the sweep checks at this interval whether it must stop.
_KEEPS = 2
"""If a sweep ends before a scan, a later sweep may use the scan's result for this many times the scan's duration."""


class ProcessScanner:
    """Scans the open files of all processes. If a scan hangs, no other scan starts and no directory may be removed."""

    def __init__(self) -> None:
        self._running: _ScanRun | None = None

    def scan(self, mount: Mount, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> InUse:
        """Return the files and mounts in use. Raises MustStay if the scan makes no progress for `SCAN_TIMEOUT_SECONDS`.

        Raises OutOfTime if ``stopping`` returns True, or if ``give_up`` returns True after `SCAN_TIMEOUT_SECONDS` of
        scanning. The scan then continues in its thread, and the next call uses its result.
        """
        # The scan has its own thread, because a read of /proc hangs if the inspected process waits for a dead file
        # server. The wait is killable, so the thread ends with our process.
        run = self._running
        if run is not None and not run.is_of_use(mount):
            # While a scan hangs, do not start another: it would hang too, and each sweep would add one more thread.
            if not run.answer.done():
                raise MustStay(KeepReason.UNSEEN, "an earlier scan of the processes has not ended")
            run = None
        run = self._running = run or _ScanRun(mount)
        while not run.answer.done():
            if stopping():
                raise OutOfTime
            now = time.monotonic()
            if now - run.moved > SCAN_TIMEOUT_SECONDS:
                run.hung = True
                raise MustStay(
                    KeepReason.UNSEEN, f"the scan of processes made no progress for {SCAN_TIMEOUT_SECONDS:g} s"
                )
            if now - run.began > SCAN_TIMEOUT_SECONDS and give_up():
                raise OutOfTime
            wait([run.answer], STEP_SECONDS)
        self._running = None
        return run.answer.result()


class _ScanRun:
    """One scan of all processes, started immediately. ``moved``: time of the last progress. ``hung``: timed out."""

    def __init__(self, mount: Mount) -> None:
        self.answer: Future[InUse] = Future()
        self.began = self.moved = time.monotonic()
        self.hung = False
        self._mount = mount
        threading.Thread(target=self._run, name="scan", daemon=True).start()

    def is_of_use(self, mount: Mount) -> bool:
        """Return whether the scan can be used: it must be for this mount, must not hang, and must not be too old."""
        if self.hung or mount != self._mount:
            return False
        return not self.answer.done() or time.monotonic() - self.moved <= _KEEPS * (self.moved - self.began)

    def _run(self) -> None:
        try:
            self.answer.set_result(scan(self._mount, moved=self._move))
        except BaseException as error:  # noqa: BLE001  # `scan` raises the error again when it reads the result.
            self.answer.set_exception(error)

    def _move(self) -> None:
        self.moved = time.monotonic()
