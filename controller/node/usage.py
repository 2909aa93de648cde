"""Whether a directory is in use: by processes that hold files open, map them, listen on a socket, or mount it.

Files are told by device and inode, as a path means different things to processes in different mount namespaces. Of
other users' processes /proc shows this only to CAP_SYS_PTRACE (proc(5)), and of those outside a container only where
it shares the host's PIDs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from controller.node.refused import Refused
from controller.node.removal import OutOfTime
from controller.node.tree import Mount, identity_of, walk
from vcuda.vm_directories import Kind, Reason

# kubelet's volumes of a pod. Whoever bind-mounts kubelet's directory keeps copies of them long after the pod's end, so
# they tell nothing; what its containers mount from beside them (etc-hosts) does.
_VOLUMES = re.compile(r"/pods/[^/]+/(?:volumes|volume-subpaths|plugins)(?:/.*)?$")
_GONE = (errno.ENOENT, errno.ESRCH, errno.EINVAL)  # what /proc says of a process that has ended, or is about to
_HOST_THREAD = "kthreadd"  # process 2 in the host's PID namespace, and in no other


@dataclass
class InUse:
    """What processes hold, as far as it could be seen.

    ``inodes``: of files on the root's device that are open, mapped, or a working or root directory. ``mounted``: every
    part of the paths of mounts and of what they mount. ``unseen``: ids of processes that could not be looked into.
    """

    inodes: set[int] = field(default_factory=set)
    mounted: set[str] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)


def survey(root: int, mount: Mount, proc: Path = Path("/proc")) -> InUse:
    """Look at every process but this one, for what it holds on the device of ``root``, an open directory."""
    found = InUse()
    device = _device_in_maps(root, mount)
    mapped = re.compile(rb" %s (\d+) " % re.escape(device))
    namespaces: set[str] = set()
    _read_mounts(proc / "self", found, namespaces)
    for pid in os.listdir(proc):  # noqa: PTH208  # names are wanted, by the thousand
        if pid.isdigit() and int(pid) != os.getpid():
            _look_at(proc / pid, found, mount.device, mapped, namespaces)
    return found


def _look_at(process: Path, found: InUse, device: int, mapped: re.Pattern[bytes], namespaces: set[str]) -> None:
    try:
        for number in os.listdir(f"{process}/fd"):  # noqa: PTH208  # as above
            _add(f"{process}/fd/{number}", found, device)
        _add(f"{process}/cwd", found, device)
        _add(f"{process}/root", found, device)
        found.inodes.update(map(int, mapped.findall((process / "maps").read_bytes())))
        _read_mounts(process, found, namespaces)
    except PermissionError:
        found.unseen.append(process.name)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _add(link: str, found: InUse, device: int) -> None:
    """Take note of the file behind one of /proc's links; one that was closed meanwhile is no longer held.

    A file that does not let itself be asked (FUSE, a server that is away) is on another file system than ours.
    PermissionError where it is the process that does not.
    """
    try:
        held = os.stat(link)  # noqa: PTH116  # twice as fast, and there are many
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            Path(link).readlink()
        return
    if held.st_dev == device:
        found.inodes.add(held.st_ino)


def _read_mounts(process: Path, found: InUse, namespaces: set[str]) -> None:
    """Read the mounts of a process, once for all that share them: fields 4 and 5 of proc_pid_mountinfo(5)."""
    namespace = str((process / "ns" / "mnt").readlink())
    if namespace in namespaces:
        return
    namespaces.add(namespace)
    for line in (process / "mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ", 5)
        for path in fields[3:5]:
            found.mounted.update(_VOLUMES.sub("", path).split("/"))


def _device_in_maps(root: int, mount: Mount) -> bytes:
    """Return the device as /proc/PID/maps writes it: the file system's own, where btrfs shows others in st_dev."""
    for line in _lines_of("/proc/self/mountinfo"):
        fields = line.split(b" ", 3)
        if int(fields[0]) == mount.number:
            major, minor = map(int, fields[2].split(b":"))
            return b"%02x:%02x" % (major, minor)
    raise Refused(Reason.ERROR, f"mount {mount.number} of descriptor {root} is not in /proc/self/mountinfo")


def _lines_of(path: str) -> Iterator[bytes]:
    yield from Path(path).read_bytes().splitlines()


def sees_host() -> bool:
    """Return whether /proc shows the host's processes."""
    try:
        return Path("/proc/2/comm").read_text().strip() == _HOST_THREAD
    except OSError:
        return False


def check_unused(fd: int, mount: Mount, in_use: InUse, stopping: Callable[[], bool]) -> None:
    """Look through an open directory; Refused where something in it is in use, or a mount point.

    OutOfTime where the process is ``stopping``: it may hold millions of files.
    """
    if identity_of(fd).inode in in_use.inodes:
        raise Refused(Reason.OPEN, "the directory itself")
    for parent, entry in walk(fd, mount):
        if stopping():
            raise OutOfTime
        if entry.inode in in_use.inodes:
            raise Refused(Reason.OPEN, entry.name)
        if entry.kind is Kind.SOCKET and listens(parent, entry.name):
            raise Refused(Reason.LISTENING, entry.name)


def listens(parent: int, name: str) -> bool:
    """Return whether a process has the other end of a socket in a directory.

    Only connecting tells it for every network namespace: the kernel finds the listener by inode (unix(7)), while
    /proc/net/unix lists those of one's own namespace, by the path that they were bound to in theirs. A listener that is
    found sees one connection that ends at once.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise Refused(Reason.CHANGED, name)
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
