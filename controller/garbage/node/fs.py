"""Opens and deletes directories by file descriptor, never through a symbolic link or across a mount.

Between two system calls, another process can replace the directory at a path, but not the directory of a descriptor.
``shutil.rmtree`` is not used: it enters mounts, and keeps all entries of a directory in memory. A tenant can make a
million entries.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.garbage.node.names import KeepReason, MustStay

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNT_ID = re.compile(rb"^mnt_id:\s*([0-9]+)$", re.MULTILINE)
_OCTAL = re.compile(rb"\\([0-7]{3})")
_BLOCK = 512  # `st_blocks` counts blocks of 512 bytes on every file system (stat(2)).

MAX_OPEN = 64
"""The deepest level of a tree that is opened below its top. Deeper directories are moved up to the top first, so that
trees of any depth need few descriptors."""


class OutOfTime(Exception):
    """The sweep must end, because its time is over or the process stops. The next sweep continues its work."""


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """An open directory. ``mount``: the id of the mount to which it and all directories in it must belong."""

    fd: int
    mount: bytes


@contextlib.contextmanager
def opened_root(path: Path) -> Iterator[OpenDirectory]:
    """Open the directory at ``path``. Raises OSError if ``path`` itself is a link or not a directory."""
    fd = os.open(path, _FLAGS)
    try:
        yield OpenDirectory(fd, mount_of(fd))
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(directory: OpenDirectory, name: str) -> Iterator[OpenDirectory]:
    """Open a subdirectory. Raises OSError if the entry is not a directory, and MustStay if it is a mount point."""
    fd = os.open(name, _FLAGS, dir_fd=directory.fd)
    try:
        if mount_of(fd) != directory.mount:
            raise MustStay(KeepReason.MOUNT, name)
        yield OpenDirectory(fd, directory.mount)
    finally:
        os.close(fd)


def mount_of(fd: int) -> bytes:
    """Return the id of an open file's mount (proc_pid_fdinfo(5)). ``st_dev`` does not show bind mounts."""
    found = _MOUNT_ID.search(Path(f"/proc/self/fdinfo/{fd}").read_bytes())
    if found is None:
        raise MustStay(KeepReason.ERROR, "/proc does not show the mount of an open file")
    return found[1]


def mounted_in(directory: OpenDirectory) -> frozenset[str]:
    """Return the names of the entries of an open directory that are or contain mount points."""
    root = os.fsencode(Path(f"/proc/self/fd/{directory.fd}").readlink()).rstrip(b"/") + b"/"
    # The fifth field is the mount point. In it, the kernel escapes spaces and newlines (proc_pid_mountinfo(5)).
    lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    points = (_OCTAL.sub(lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[4]) for line in lines if line)
    return frozenset(os.fsdecode(each[len(root) :].split(b"/")[0]) for each in points if each.startswith(root))


class TreeRemoval:
    """Deletes one subdirectory of ``root`` with its contents. ``freed``: the freed bytes of files.

    ``stopping``: called before each step. If it returns True, the deletion ends.
    """

    def __init__(self, root: OpenDirectory, stopping: Callable[[], bool]) -> None:
        self.freed = 0
        self._root = root
        self._stopping = stopping

    def remove(self, name: str, top: OpenDirectory) -> None:
        """Delete the directory ``top``, which is open and has this name in the root, and its contents.

        Raises OSError, MustStay or OutOfTime if an entry is not deleted. The remaining entries stay too.
        """
        while self._empty(top, top, 0):
            pass  # Directories of deep levels are now entries of `top`.
        if not os.path.samestat(os.fstat(top.fd), os.stat(name, dir_fd=self._root.fd, follow_symlinks=False)):
            raise MustStay(KeepReason.CHANGED)
        os.rmdir(name, dir_fd=self._root.fd)

    def _empty(self, directory: OpenDirectory, top: OpenDirectory, level: int) -> bool:
        """Delete the entries of a directory. Return False if it had no entries."""
        found = False
        with os.scandir(directory.fd) as entries:
            for entry in entries:
                found = True
                if self._stopping():
                    raise OutOfTime
                if not entry.is_dir(follow_symlinks=False):
                    self._unlink(directory, entry.name)
                elif level == MAX_OPEN:
                    os.rename(entry.name, f"~{entry.inode()}", src_dir_fd=directory.fd, dst_dir_fd=top.fd)
                else:
                    with opened(directory, entry.name) as below:
                        self._empty(below, top, level + 1)
                    os.rmdir(entry.name, dir_fd=directory.fd)
        return found

    def _unlink(self, directory: OpenDirectory, name: str) -> None:
        found = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
        os.unlink(name, dir_fd=directory.fd)
        if found.st_nlink == 1:
            self.freed += found.st_blocks * _BLOCK
