"""Whether a directory is in use: by processes that hold files open, map them, listen on a socket, or mount it.

Files are told by device and inode, as a path means different things to processes in different mount namespaces. Of
other users' processes /proc shows this only to CAP_SYS_PTRACE (proc(5)), and of those outside a container only where
it shares the host's PIDs.

A process may hold files of a server that does not answer (NFS, FUSE), and whoever asks for them waits as well. So the
mount of each is looked up first. Only files of the root's own file system are asked for, and those of mounts that are
nowhere to be seen.
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
    OpenDirectory,
    OutOfTime,
    identity_at,
    identity_of,
    mount_number,
    walk,
)
from controller.garbage.node.names import FileKind, KeepReason, MustStay

# kubelet's volumes of a pod. Whoever bind-mounts kubelet's directory keeps copies of them long after the pod's end, so
# they tell nothing; what its containers mount from beside them (etc-hosts) does.
_VOLUMES = re.compile(r"/pods/[^/]+/(?:volumes|volume-subpaths|plugins)(?:/.*)?$")
_MOUNT = re.compile("([0-9]+) [0-9]+ ([0-9]+):([0-9]+) ([^ ]*) ([^ ]*) .*? - ([^ ]*) ", re.DOTALL)
_PATH = re.compile(rb" (/.*)$", re.MULTILINE)
_STACKED = ("overlay", "aufs")
_OWN_MOUNTS = Path("/proc/self/mountinfo")
_GONE = (errno.ENOENT, errno.ESRCH, errno.EINVAL)  # what /proc says of a process that has ended, or is about to
_STALE = (errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EIO)  # of a thread or server that is gone
_HOST_THREAD = "kthreadd"  # process 2 in the host's PID namespace, and in no other

Device = tuple[int, int]
"""Major and minor number."""


class _Mounted(NamedTuple):
    """A mount: its number, its file system's device, what of that is mounted, where, and its kind.

    Paths are as mountinfo writes them.
    """

    number: int
    device: Device
    root: str
    point: str
    kind: str


@dataclass
class InUse:
    """What processes hold, as far as it could be seen.

    ``files``: what is open, or a working or root directory. ``mapped``: inodes of what is mapped from the root's file
    system; ``named``: where that is a stacked one, every part of the paths of mapped files. ``mounted``: every part of
    the paths of mounts and of what they mount. ``unseen``: ids of processes that could not be looked into.
    """

    files: set[Identity] = field(default_factory=set)
    mapped: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)
    mounted: set[str] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)

    def holds(self, file: Identity) -> bool:
        """Return whether a process has this file open or mapped."""
        return file in self.files or file.inode in self.mapped


def scan(root: int, mount: Mount, proc: Path = Path("/proc"), moved: Callable[[], None] = lambda: None) -> InUse:
    """Look at every process but this one, for what it holds on the file system of ``root``, an open directory.

    ``moved`` is called at each process, thread and open file.
    """
    scan_run = Scan(_mounted_at(root, mount), moved)
    scan_run.read_mounts(proc / "self")
    names = os.listdir(proc)  # noqa: PTH208  # names are wanted, by the thousand
    processes = [proc / name for name in names if name.isdigit() and int(name) != os.getpid()]
    # All mounts first: a file may lie on a mount that only a process later in the list has, and by the mount it is
    # known whether the file may be asked for at all.
    for process in processes:
        moved()
        with contextlib.suppress(OSError):  # met again below
            scan_run.read_mounts(process)
    for process in processes:
        scan_run.at_process(process)
    return scan_run.found


@dataclass
class Scan:
    """A scan under way.

    ``home`` is the root's mount; ``mounts``: the device of each that was seen, by its number. ``moved`` hears of each
    step.
    """

    home: _Mounted
    moved: Callable[[], None]
    found: InUse = field(default_factory=InUse)
    namespaces: set[str] = field(default_factory=set)
    mounts: dict[int, Device] = field(default_factory=dict)

    def at_process(self, process: Path) -> None:
        """Look at the first thread; where that has ended before the others, and holds nothing any more, at each.

        Such a process is not gone (pthread_exit(3), "Notes"), and what its threads hold is seen at them alone.
        """
        if self._at_thread(process):
            return
        threads: list[str] = []
        with contextlib.suppress(OSError):  # the process has ended
            threads = os.listdir(process / "task")  # noqa: PTH208  # names are wanted, by the thousand
        others = [self._at_thread(process / "task" / name) for name in threads if name != process.name]
        if others and not any(others):
            self.found.unseen.append(process.name)

    def _at_thread(self, thread: Path) -> bool:
        # Look at what a thread holds; return whether it has not ended meanwhile. One that ends lets go of its memory
        # before all else (do_exit in Linux' kernel/exit.c): where that is still to be read, last, the rest was whole.
        self.moved()
        try:
            self.read_mounts(thread)
            for number in os.listdir(f"{thread}/fd"):  # noqa: PTH208  # names are wanted, by the thousand
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
        # Take note of what is mapped from the root's file system. Of a file on a stacked one, kernels before 6.8 show
        # the device and inode in the layer below: its path tells it.
        self.found.mapped.update(map(int, re.findall(rb" %02x:%02x (\d+) " % self.home.device, maps)))
        if self.home.kind in _STACKED:
            for path in set(_PATH.findall(maps)):
                self.found.named.update(os.fsdecode(path).split("/"))

    def _add_open(self, link: str, info: str) -> None:
        # Take note of an open file; one that was closed meanwhile is no longer held. PermissionError where the process
        # does not let itself be looked into.
        with contextlib.suppress(FileNotFoundError):
            if _has_path(link):
                self._add(mount_number(info), lambda: os.stat(link))  # noqa: PTH116  # twice as fast, and there are many

    def _add_directory(self, link: str) -> None:
        # Take note of a working or root directory; of these /proc tells no mount, but a descriptor of ours does.
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
        # Take note of a file, unless its mount is known to be of another file system: then it is not asked. OSError
        # where one of the root's file system does not tell what it is. Where the mount is not known, that is taken for
        # a file of a server that has died.
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
        """Read the mounts of a process, once for all that share them: proc_pid_mountinfo(5)."""
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
    # Return whether one of /proc's links leads to a file: not to a pipe, a socket, or the like.
    try:
        return os.readlink(link).startswith("/")  # noqa: PTH115  # as above
    except (PermissionError, FileNotFoundError):
        raise
    except OSError:
        return True  # its path is too long to be told


def _mounted_at(root: int, mount: Mount) -> _Mounted:
    # Return the root's mount. Its device is the file system's own, as in maps, where btrfs shows others in st_dev.
    for found in _mounts_in(_OWN_MOUNTS):
        if found.number == mount.number:
            return found
    raise MustStay(KeepReason.ERROR, f"mount {mount.number} of descriptor {root} is not in {_OWN_MOUNTS}")


def mount_points() -> frozenset[str]:
    """Return the last parts of the paths of all mount points that this process sees."""
    return frozenset(found.point.rpartition("/")[2] for found in _mounts_in(_OWN_MOUNTS))


def _mounts_in(path: Path) -> list[_Mounted]:
    # A newline in a path is escaped there, and no other character ends a line. What is no mount is passed over.
    matches = map(_MOUNT.match, os.fsdecode(path.read_bytes()).split("\n"))
    return [_Mounted(int(each[1]), (int(each[2]), int(each[3])), *each.group(4, 5, 6)) for each in matches if each]


def sees_host() -> bool:
    """Return whether /proc shows the host's processes."""
    try:
        return Path("/proc/2/comm").read_text().strip() == _HOST_THREAD
    except OSError:
        return False


def check_unused(fd: int, mount: Mount, in_use: InUse, stopping: Callable[[], bool]) -> None:
    """Look through an open directory; MustStay where something in it is in use, or a mount point.

    OutOfTime where the process is ``stopping``: it may hold millions of files.
    """
    if in_use.holds(identity_of(fd)):
        raise MustStay(KeepReason.OPEN, "the directory itself")
    for parent, entry in walk(fd, mount):
        if stopping():
            raise OutOfTime
        if _is_held(entry.name, parent, in_use):
            raise MustStay(KeepReason.OPEN, entry.name)
        if entry.kind is FileKind.SOCKET and listens(parent, entry.name):
            raise MustStay(KeepReason.LISTENING, entry.name)


def _is_held(name: str, parent: int, in_use: InUse) -> bool:
    # Return whether a process holds a file. A directory's listing may show another inode than the file itself.
    try:
        return in_use.holds(identity_at(name, parent))
    except FileNotFoundError:
        return False  # somebody else has removed it


def listens(parent: int, name: str) -> bool:
    """Return whether a process has the other end of a socket in a directory.

    Only connecting tells it for every network namespace: the kernel finds the listener by inode (unix(7)), while
    /proc/net/unix lists those of one's own namespace, by the path that they were bound to in theirs. A listener that is
    found sees one connection that ends at once.
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
        return True  # its queue is full (EAGAIN), or it is no stream (EPROTOTYPE): somebody has bound it
    finally:
        os.close(fd)
    return True


# So long a scan may stand still. As a whole it may take longer: one of a thousand processes takes about a second, but
# anyone can have millions of files open.
SCAN_TIMEOUT_SECONDS = 120.0

STEP_SECONDS = 0.2  # between two looks whether the process is to stop
_KEEPS = 2  # times as long as a scan took; then what it saw is too old


class ProcessScanner:
    """Makes one scan after the other. While one hangs no other is begun, and it is not known what is in use."""

    def __init__(self, timeout: float = SCAN_TIMEOUT_SECONDS) -> None:
        self._timeout = timeout
        self._running: _ScanRun | None = None

    def scan(self, root: OpenDirectory, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> InUse:
        """Return what processes hold. MustStay where nothing more is seen of it for the timeout.

        OutOfTime where ``stopping``, and where ``give_up`` once the timeout has passed: then the scan goes on, and the
        next call takes it up.
        """
        # In a thread of its own: whoever reads /proc of a process that waits for a dead server waits as well. A thread
        # that hangs so ends with this process: such waits are killable.
        run = self._running
        if run is not None and not run.is_of_use(root.mount):
            # A second thread beside one that hangs would hang as well, and so on with every sweep.
            if not run.answer.done():
                raise MustStay(KeepReason.UNSEEN, "an earlier look has not ended")
            run = None
        run = self._running = run or _ScanRun(root)
        while not run.answer.done():
            if stopping():
                raise OutOfTime
            now = time.monotonic()
            if now - run.moved > self._timeout:
                run.hung = True
                raise MustStay(KeepReason.UNSEEN, f"nothing has moved for {self._timeout:g} s")
            if now - run.began > self._timeout and give_up():
                raise OutOfTime
            wait([run.answer], STEP_SECONDS)
        self._running = None
        return run.answer.result()


class _ScanRun:
    """One scan, which begins at once. ``moved``: when it last saw something; ``hung``: that was too long ago."""

    def __init__(self, root: OpenDirectory) -> None:
        self.answer: Future[InUse] = Future()
        self.began = self.moved = time.monotonic()
        self.hung = False
        self._mount = root.mount
        threading.Thread(target=self._run, args=(root,), name="scan", daemon=True).start()

    def is_of_use(self, mount: Mount) -> bool:
        """Return whether it tells what is in use on this mount by now."""
        if self.hung or mount != self._mount:
            return False
        return not self.answer.done() or time.monotonic() - self.moved <= _KEEPS * (self.moved - self.began)

    def _run(self, root: OpenDirectory) -> None:
        try:
            self.answer.set_result(scan(root.fd, root.mount, moved=self._move))
        except BaseException as error:  # noqa: BLE001  # it is raised where the answer is waited for
            self.answer.set_exception(error)

    def _move(self) -> None:
        self.moved = time.monotonic()
