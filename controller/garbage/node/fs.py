"""Opens, walks, renames and deletes directories by file descriptor, never through a symbolic link or across a mount.

Between two system calls, another process can replace the directory at a path, but not the directory of a descriptor.
``st_dev`` does not reveal a bind mount of the same file system. So the mount id of each directory is compared too.
``/proc/self/fdinfo`` shows the mount id (proc_pid_fdinfo(5)).
"""

import contextlib
import ctypes
import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

from controller.garbage.node.names import FileKind, KeepReason, MustStay

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# To limit open descriptors, a walk keeps only the 64 deepest levels of directories open. When it returns to a higher
# level, it opens that directory again as `..` of the subdirectory.
_KEPT_OPEN = 64
MAX_PARKED = 10_000
"""The maximum number of unvisited entries that stay in memory for a directory that a walk has closed temporarily."""
_PARKED = -1
_MOUNT_NUMBER = re.compile(rb"^mnt_id:\s*([0-9]+)$", re.MULTILINE)


class Identity(NamedTuple):
    """The device and inode of a file. They do not change when the file is renamed."""

    device: int
    inode: int


class Mount(NamedTuple):
    """The mount that contains a directory: the device of its file system, and its mount id."""

    device: int
    number: int


class DirectoryEntry(NamedTuple):
    """One entry of a directory."""

    name: str
    kind: FileKind
    inode: int


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """An open directory, and the mount to which all directories in it must belong."""

    fd: int
    mount: Mount


@contextlib.contextmanager
def opened_root(path: Path) -> Iterator[OpenDirectory]:
    """Open the directory at ``path``. Raises OSError if ``path`` itself is a link or not a directory."""
    fd = os.open(path, _FLAGS)
    try:
        yield OpenDirectory(fd, mount_of(fd))
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(directory: OpenDirectory, name: str) -> Iterator[int]:
    """Open a subdirectory. Raises OSError if the entry is not a directory, and MustStay if it is a mount point."""
    fd = open_directory(name, directory.fd, directory.mount)
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(name: str, parent: int, mount: Mount) -> int:
    """Return the descriptor of a directory in ``parent``. The caller must close it. Raises the errors of `opened`."""
    fd = os.open(name, _FLAGS, dir_fd=parent)
    try:
        same = mount_of(fd) == mount
    except BaseException:
        os.close(fd)
        raise
    if same:
        return fd
    os.close(fd)
    raise MustStay(KeepReason.MOUNT, name)


def mount_of(fd: int) -> Mount:
    return Mount(os.fstat(fd).st_dev, mount_number(f"/proc/self/fdinfo/{fd}"))


def mount_number(info: str) -> int:
    """Return the mount id of an open file. ``info``: the path of the file's fdinfo in /proc."""
    fd = os.open(info, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    number = _MOUNT_NUMBER.search(text)
    if number is None:
        raise MustStay(KeepReason.ERROR, f"{info} has no line mnt_id, which would show the mount of an open file")
    return int(number[1])


def identity_of(fd: int) -> Identity:
    found = os.fstat(fd)
    return Identity(found.st_dev, found.st_ino)


def identity_at(name: str, parent: int) -> Identity:
    """Return the device and inode of an entry of an open directory. A symbolic link is not followed."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    return Identity(found.st_dev, found.st_ino)


def entries(fd: int) -> Generator[DirectoryEntry]:
    """Yield the entries of an open directory in any order. Only a few entries are in memory at once."""
    with os.scandir(fd) as listing:
        for entry in listing:
            try:
                kind = _kind(entry)
            except FileNotFoundError:
                continue  # Another process has just removed the entry.
            yield DirectoryEntry(entry.name, kind, entry.inode())


def _kind(entry: os.DirEntry[str]) -> FileKind:
    # A listing usually includes the type of each entry (d_type). If the type is missing, as on some network file
    # systems, `is_dir` and the other methods make a stat of the file, which may fail.
    try:
        if entry.is_dir(follow_symlinks=False):
            return FileKind.DIRECTORY
        if entry.is_file(follow_symlinks=False):
            return FileKind.FILE
        if entry.is_symlink():
            return FileKind.LINK
        mode = entry.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:
        raise
    except OSError:
        return FileKind.UNKNOWN
    return FileKind.SOCKET if stat.S_ISSOCK(mode) else FileKind.OTHER


@dataclass(slots=True)
class _Level:
    """A directory on the path from the top of a walk to the current directory. ``rest``: its unvisited entries."""

    fd: int
    identity: Identity
    listing: Generator[DirectoryEntry]
    rest: Iterator[DirectoryEntry]

    @classmethod
    def of(cls, fd: int) -> "_Level":
        listing = entries(fd)
        return cls(fd, identity_of(fd), listing, listing)

    def park(self) -> None:
        """Close the directory until the walk returns. Keep the unvisited entries. Raises MustStay for too many."""
        held = list(islice(self.rest, MAX_PARKED + 1))
        if len(held) > MAX_PARKED:
            raise MustStay(
                KeepReason.ERROR,
                f"a directory has more than {_KEPT_OPEN} levels below it and over {MAX_PARKED} entries",
            )
        self.rest = iter(held)
        self.listing.close()
        os.close(self.fd)
        self.fd = _PARKED

    def resume(self, child: int) -> None:
        """Open the directory again after `park`, as the parent (``..``) of its open subdirectory ``child``."""
        if self.fd != _PARKED:
            return
        self.fd = os.open("..", _FLAGS, dir_fd=child)
        if identity_of(self.fd) != self.identity:
            raise MustStay(KeepReason.CHANGED, "a subdirectory was moved during the sweep")

    def close(self) -> None:
        self.listing.close()
        if self.fd != _PARKED:
            os.close(self.fd)


def walk(top: int, mount: Mount) -> Iterator[tuple[int, DirectoryEntry]]:
    """Yield every entry below the directory ``top``, each with the descriptor of the directory that contains it.

    The number of open descriptors and the memory are bounded for trees of any size. A symbolic link is yielded and not
    followed. Raises MustStay if the tree contains a mount point, changes during the walk, or contains an entry of
    unknown type.
    """
    levels = [_Level.of(os.dup(top))]
    try:
        while levels:
            entry = next(levels[-1].rest, None)
            if entry is None:
                with contextlib.closing(levels.pop()) as done:
                    if levels:
                        levels[-1].resume(done.fd)
                continue
            if entry.kind is FileKind.UNKNOWN:
                raise MustStay(KeepReason.ERROR, f"the type of {entry.name} cannot be read")
            yield levels[-1].fd, entry
            if entry.kind is FileKind.DIRECTORY:
                levels.append(_Level.of(open_directory(entry.name, levels[-1].fd, mount)))
                if len(levels) > _KEPT_OPEN and levels[-_KEPT_OPEN - 1].fd != _PARKED:
                    levels[-_KEPT_OPEN - 1].park()
    finally:
        for level in levels:
            level.close()


_RENAME_NOREPLACE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# The errors of renameat2(2) if the kernel or the file system (for example NFS) does not support this call.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def rename(name: str, parent: int, new_name: str, new_parent: int) -> None:
    """Move an entry from one open directory to another. Raises FileExistsError if the new name is in use."""
    number = renameat2(name, parent, new_name, new_parent)
    if number in _NOT_SUPPORTED:
        # Another process may create an entry with the new name between this check and the rename. os.rename replaces
        # a new entry only if the entry is an empty directory (rename(2)), so no file is lost.
        try:
            os.stat(new_name, dir_fd=new_parent, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)
            return
        number = errno.EEXIST
    if number:
        raise OSError(number, os.strerror(number), name)


def renameat2(name: str, parent: int, new_name: str, new_parent: int) -> int:
    """Rename an entry, unless the new name is in use. Return the errno of the system call; 0 if it succeeded."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return errno.ENOSYS
    if call(parent, os.fsencode(name), new_parent, os.fsencode(new_name), _RENAME_NOREPLACE) == 0:
        return 0
    return ctypes.get_errno()


# The deletion of a directory deletes at least this many entries, even if the time of the sweep is over. Without this
# minimum, nothing would ever be deleted if the checks before the deletion always took all the time.
BATCH = 10_000

_BLOCK = 512  # `st_blocks` counts blocks of 512 bytes on every file system (stat(2)).


class OutOfTime(Exception):
    """The sweep must end, because its time is over or the process stops. The next sweep continues its work."""


class TreeRemoval:
    """Deletes one subdirectory of ``directory`` with its contents. ``freed``: the number of freed bytes.

    If ``stopping`` returns True, the deletion ends immediately. If ``give_up`` returns True, the deletion ends after at
    least `BATCH` entries. If an entry cannot be deleted, the other entries are still deleted.
    """

    # Directories at deeper levels are moved up into the directory that is being deleted. So the use of memory and
    # descriptors does not depend on the depth of the tree. If the process is killed, the tree that remains is flatter.

    def __init__(self, directory: OpenDirectory, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> None:
        self.freed = 0
        self._directory = directory
        self._give_up = give_up
        self._stopping = stopping
        self._steps = count()
        self._fresh = count()
        self._failures: list[OSError | MustStay] = []

    def remove(self, name: str) -> None:
        """Delete the subdirectory ``name`` and its contents. Raises OSError or MustStay if an entry is not deleted."""
        with opened(self._directory, name) as top:
            while self._empty(top) and not self._failures:
                pass
            blocks = os.fstat(top).st_blocks
        if self._failures:
            raise self._failures[0]
        os.rmdir(name, dir_fd=self._directory.fd)
        self.freed += blocks * _BLOCK

    def _empty(self, top: int) -> bool:
        # Delete all entries of the directory `top`. Return True if `top` had entries: it may then have new entries,
        # which were moved up from subdirectories, so the caller must call again.
        found = False
        for entry in entries(top):
            found = True
            if entry.kind is FileKind.DIRECTORY:
                self._attempt(self._dissolve, top, entry.name)
            else:
                self._attempt(self._unlink, top, entry.name)
        return found

    def _dissolve(self, top: int, name: str) -> None:
        # Delete the subdirectory `name` of the directory `top`. The subdirectories of `name` are moved up into `top`.
        with opened(OpenDirectory(top, self._directory.mount), name) as fd:
            for entry in entries(fd):
                if entry.kind is FileKind.DIRECTORY:
                    self._attempt(self._lift, fd, entry.name, top)
                else:
                    self._attempt(self._unlink, fd, entry.name)
            blocks = os.fstat(fd).st_blocks
        os.rmdir(name, dir_fd=top)
        self.freed += blocks * _BLOCK

    def _lift(self, parent: int, name: str, top: int) -> None:
        for number in self._fresh:
            try:
                rename(name, parent, f"~{number}", top)
            except FileExistsError:
                continue
            return

    def _unlink(self, parent: int, name: str) -> None:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        os.unlink(name, dir_fd=parent)
        if found.st_nlink == 1:
            self.freed += found.st_blocks * _BLOCK

    def _attempt(self, step: Callable[..., None], *arguments: object) -> None:
        if self._stopping() or (next(self._steps) >= BATCH and self._give_up()):
            raise OutOfTime
        try:
            step(*arguments)
        except FileNotFoundError:
            return  # Another process has deleted the entry.
        except (OSError, MustStay) as error:
            if not self._failures:
                self._failures.append(error)
