"""The trash beside the directories: what is to be deleted is moved there first, and stays for a while.

A move is two renames. The first gives a name that ends in ``.moving``; only what then proves to be the very directory
that was checked gets its final name. So whoever exchanges it in between, and whenever the process is killed: what has
the final name was checked, and what has the other goes back to where it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from controller.node.agent import Action
from controller.node.fs import OpenDirectory, TreeRemoval, identity_at, identity_of, open_directory, rename
from controller.node.names import TRASH, KeepReason, MustStay, moving_name, trash_name


class Trash(Protocol):
    """What is done to directories; ``directory`` is the trash itself, None where there is none."""

    @property
    def directory(self) -> OpenDirectory | None:
        """The open trash."""

    def take(self, name: str, fd: int, time: int) -> Action:
        """Move a directory from the root, open as ``fd``, into the trash; ``time`` is in Unix seconds."""

    def give_back(self, trashed: str, name: str) -> Action:
        """Move something from the trash back to its name; FileExistsError where that is taken."""

    def delete(self, trashed: str, removal: TreeRemoval) -> Action:
        """Delete something in the trash for good."""


@dataclass(frozen=True, slots=True)
class RealTrash:
    """The real one. Every method raises OSError where a step fails, and Refused where something has to stay."""

    root: OpenDirectory
    directory: OpenDirectory

    def take(self, name: str, fd: int, time: int) -> Action:
        """Move a directory; Refused where it was exchanged meanwhile: what is there then goes back."""
        moving = moving_name(name, time)
        rename(name, self.root.fd, moving, self.directory.fd)
        if identity_at(moving, self.directory.fd) != identity_of(fd):
            rename(moving, self.directory.fd, name, self.root.fd)
            raise MustStay(KeepReason.CHANGED)
        rename(moving, self.directory.fd, trash_name(name, time), self.directory.fd)
        return Action.MOVED

    def give_back(self, trashed: str, name: str) -> Action:
        """Move it back."""
        rename(trashed, self.directory.fd, name, self.root.fd)
        return Action.RESTORED

    def delete(self, trashed: str, removal: TreeRemoval) -> Action:
        """Delete it."""
        removal.remove(trashed)
        return Action.DELETED


@dataclass(frozen=True, slots=True)
class DryRunTrash:
    """Only says what would be done."""

    directory: OpenDirectory | None

    def take(self, name: str, fd: int, time: int) -> Action:  # noqa: ARG002  # nothing is done to it
        """Move nothing."""
        return Action.WOULD_MOVE

    def give_back(self, trashed: str, name: str) -> Action:  # noqa: ARG002  # nothing is done to it
        """Move nothing back."""
        return Action.WOULD_RESTORE

    def delete(self, trashed: str, removal: TreeRemoval) -> Action:  # noqa: ARG002  # nothing is done to it
        """Delete nothing."""
        return Action.WOULD_DELETE


OpenTrash = Callable[[OpenDirectory], contextlib.AbstractContextManager[Trash]]
"""Called with the root of each sweep."""


@contextlib.contextmanager
def open_trash(root: OpenDirectory) -> Iterator[Trash]:
    """Open the trash, and make it where there is none: early, for on a full disk there may be no room for it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(TRASH, 0o700, dir_fd=root.fd)
    fd = open_directory(TRASH, root.fd, root.mount)
    try:
        yield RealTrash(root, OpenDirectory(fd, root.mount))
    finally:
        os.close(fd)


@contextlib.contextmanager
def open_dry_run_trash(root: OpenDirectory) -> Iterator[Trash]:
    """Open the trash if there is one; nothing is written."""
    try:
        fd = open_directory(TRASH, root.fd, root.mount)
    except FileNotFoundError:
        yield DryRunTrash(None)
        return
    try:
        yield DryRunTrash(OpenDirectory(fd, root.mount))
    finally:
        os.close(fd)
