"""Directories by descriptor: nothing is reached by a path, through a link, or across a mount.

A path can be exchanged between two calls, a descriptor cannot. ``st_dev`` does not tell a bind mount of the same file
system, so each directory's mount id is compared as well: ``/proc/self/fdinfo`` has it (proc_pid_fdinfo(5)).
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
_KEPT_OPEN = 64  # levels of a walk; what lies above is closed, and found again by ".."
MAX_PARKED = 10_000  # entries a closed level may still have to visit: they are held in memory
_PARKED = -1
_MOUNT_NUMBER = re.compile(rb"^mnt_id:\s*([0-9]+)$", re.MULTILINE)


class Identity(NamedTuple):
    """What stays the same about a file while it exists, whatever it is called."""

    device: int
    inode: int


class Mount(NamedTuple):
    """Where in the tree of mounts a directory lies: its file system's device, and the number of the mount."""

    device: int
    number: int


class DirectoryEntry(NamedTuple):
    """One name in a directory."""

    name: str
    kind: FileKind
    inode: int


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """An open directory that holds others, and the mount that all of them must belong to."""

    fd: int
    mount: Mount


@contextlib.contextmanager
def opened_root(path: Path) -> Iterator[OpenDirectory]:
    """Open the directory at ``path``; its last part must be no link. OSError where that fails."""
    fd = os.open(path, _FLAGS)
    try:
        yield OpenDirectory(fd, mount_of(fd))
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(directory: OpenDirectory, name: str) -> Iterator[int]:
    """Open a directory in a place; OSError where it is none, MustStay where it is a mount point."""
    fd = open_directory(name, directory.fd, directory.mount)
    try:
        yield fd
    finally:
        os.close(fd)


def open_directory(name: str, parent: int, mount: Mount) -> int:
    """Return a descriptor of a directory in ``parent``, for the caller to close."""
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
    """Return the mount that an open directory was reached by."""
    return Mount(os.fstat(fd).st_dev, mount_number(f"/proc/self/fdinfo/{fd}"))


def mount_number(info: str) -> int:
    """Return the number of the mount that a file was reached by, from what /proc tells of its descriptor."""
    fd = os.open(info, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    number = _MOUNT_NUMBER.search(text)
    if number is None:
        raise MustStay(KeepReason.ERROR, f"{info} does not tell a mount")
    return int(number[1])


def identity_of(fd: int) -> Identity:
    """Return the identity of an open file."""
    found = os.fstat(fd)
    return Identity(found.st_dev, found.st_ino)


def identity_at(name: str, parent: int) -> Identity:
    """Return the identity of what a name stands for now: of a link itself, not of its target."""
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    return Identity(found.st_dev, found.st_ino)


def entries(fd: int) -> Generator[DirectoryEntry]:
    """Yield what an open directory holds, in no order, a few at a time."""
    with os.scandir(fd) as listing:
        for entry in listing:
            try:
                kind = _kind(entry)
            except FileNotFoundError:
                continue  # it has just gone
            yield DirectoryEntry(entry.name, kind, entry.inode())


def _kind(entry: os.DirEntry[str]) -> FileKind:
    # Mostly without a further call: a directory's listing tells it (d_type). Where it does not, as on some network file
    # systems, each of these asks the file, which may fail.
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
    """A directory on the way from the top of a walk to where it is; ``rest`` is what it has still to visit."""

    fd: int
    identity: Identity
    listing: Generator[DirectoryEntry]
    rest: Iterator[DirectoryEntry]

    @classmethod
    def of(cls, fd: int) -> "_Level":
        listing = entries(fd)
        return cls(fd, identity_of(fd), listing, listing)

    def park(self) -> None:
        """Close it for as long as the walk is far below."""
        held = list(islice(self.rest, MAX_PARKED + 1))
        if len(held) > MAX_PARKED:
            raise MustStay(KeepReason.ERROR, f"over {MAX_PARKED} entries above {_KEPT_OPEN} levels of directories")
        self.rest = iter(held)
        self.listing.close()
        os.close(self.fd)
        self.fd = _PARKED

    def resume(self, child: int) -> None:
        """Be open again, found from a directory in it."""
        if self.fd != _PARKED:
            return
        self.fd = os.open("..", _FLAGS, dir_fd=child)
        if identity_of(self.fd) != self.identity:
            raise MustStay(KeepReason.CHANGED, "a directory in it was moved away")

    def close(self) -> None:
        self.listing.close()
        if self.fd != _PARKED:
            os.close(self.fd)


def walk(top: int, mount: Mount) -> Iterator[tuple[int, DirectoryEntry]]:
    """Yield (descriptor of its directory, entry) for all that lies below ``top``, however wide or deep.

    Few descriptors and little memory, whatever the tree. MustStay where a mount point lies in it, or where it changes
    while it is read, or something in it cannot be asked what it is. A link is yielded, and not followed.
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
                raise MustStay(KeepReason.ERROR, f"what {entry.name} is cannot be read")
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
# An old kernel, or a file system that cannot (NFS) say so: renameat2(2).
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def rename(name: str, parent: int, new_name: str, new_parent: int) -> None:
    """Rename from one open directory to another. FileExistsError where the new name is taken, else OSError."""
    number = renameat2(name, parent, new_name, new_parent)
    if number in _NOT_SUPPORTED:
        # What another process makes under the new name after this look is replaced only if it is an empty directory
        # (rename(2)), and then nothing is lost.
        try:
            os.stat(new_name, dir_fd=new_parent, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)
            return
        number = errno.EEXIST
    if number:
        raise OSError(number, os.strerror(number), name)


def renameat2(name: str, parent: int, new_name: str, new_parent: int) -> int:
    """Return the number of the error, 0 where there was none."""
    call = getattr(_LIBC, "renameat2", None)
    if call is None:
        return errno.ENOSYS
    if call(parent, os.fsencode(name), new_parent, os.fsencode(new_name), _RENAME_NOREPLACE) == 0:
        return 0
    return ctypes.get_errno()


# So many entries every deletion deletes, though the time is up: where the check before it takes a whole period, it
# would else never begin.
BATCH = 10_000

_BLOCK = 512  # bytes; the unit of st_blocks, whatever the file system's own (stat(2))


class OutOfTime(Exception):
    """The sweep has to end; what is left is for the next one."""


class TreeRemoval:
    """Empties and removes one directory in a place. ``freed`` counts the bytes given back.

    ``stopping`` ends it at once, ``give_up`` after a batch. What cannot be deleted does not keep the rest from it.
    """

    # A directory below the first level is not descended into but moved up to the top and emptied there: so nothing
    # depends on the depth, and a process that is killed leaves a tree that is only flatter.

    def __init__(self, directory: OpenDirectory, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> None:
        self.freed = 0
        self._directory = directory
        self._give_up = give_up
        self._stopping = stopping
        self._steps = count()
        self._fresh = count()
        self._failures: list[OSError | MustStay] = []

    def remove(self, name: str) -> None:
        """Delete the directory and all that is in it; the first OSError or MustStay, where some of it stays."""
        with opened(self._directory, name) as top:
            while self._empty(top) and not self._failures:
                pass
            blocks = os.fstat(top).st_blocks
        if self._failures:
            raise self._failures[0]
        os.rmdir(name, dir_fd=self._directory.fd)
        self.freed += blocks * _BLOCK

    def _empty(self, top: int) -> bool:
        # Delete what the top holds; return whether there was anything: moved up, it may need another round.
        found = False
        for entry in entries(top):
            found = True
            if entry.kind is FileKind.DIRECTORY:
                self._attempt(self._dissolve, top, entry.name)
            else:
                self._attempt(self._unlink, top, entry.name)
        return found

    def _dissolve(self, top: int, name: str) -> None:
        # Delete a directory of the top: its files at once, its directories after they have moved up.
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
        # Take one step; one that fails is remembered, and the others go on.
        if self._stopping() or (next(self._steps) >= BATCH and self._give_up()):
            raise OutOfTime
        try:
            step(*arguments)
        except FileNotFoundError:
            return  # somebody else has deleted it
        except (OSError, MustStay) as error:
            if not self._failures:
                self._failures.append(error)
