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

from controller.node.agent import Verdict
from controller.node.fs import Place, Removal, identity_at, identity_of, open_directory, rename
from controller.node.names import TRASH, Reason, Refused, moving_name, trash_name


class Hands(Protocol):
    """What is done to directories; ``place`` is the trash itself, None where there is none."""

    @property
    def place(self) -> Place | None:
        """The open trash."""

    def take(self, name: str, fd: int, time: int) -> Verdict:
        """Move a directory from the root, open as ``fd``, into the trash; ``time`` is in Unix seconds."""

    def give_back(self, trashed: str, name: str) -> Verdict:
        """Move something from the trash back to its name; FileExistsError where that is taken."""

    def delete(self, trashed: str, removal: Removal) -> Verdict:
        """Delete something in the trash for good."""


@dataclass(frozen=True, slots=True)
class Trash:
    """The real one. Every method raises OSError where a step fails, and Refused where something has to stay."""

    root: Place
    place: Place

    def take(self, name: str, fd: int, time: int) -> Verdict:
        """Move a directory; Refused where it was exchanged meanwhile: what is there then goes back."""
        moving = moving_name(name, time)
        rename(name, self.root.fd, moving, self.place.fd)
        if identity_at(moving, self.place.fd) != identity_of(fd):
            rename(moving, self.place.fd, name, self.root.fd)
            raise Refused(Reason.CHANGED)
        rename(moving, self.place.fd, trash_name(name, time), self.place.fd)
        return Verdict.MOVED

    def give_back(self, trashed: str, name: str) -> Verdict:
        """Move it back."""
        rename(trashed, self.place.fd, name, self.root.fd)
        return Verdict.RESTORED

    def delete(self, trashed: str, removal: Removal) -> Verdict:
        """Delete it."""
        removal.remove(trashed)
        return Verdict.DELETED


@dataclass(frozen=True, slots=True)
class NoHands:
    """Only says what would be done."""

    place: Place | None

    def take(self, name: str, fd: int, time: int) -> Verdict:  # noqa: ARG002  # nothing is done to it
        """Move nothing."""
        return Verdict.WOULD_MOVE

    def give_back(self, trashed: str, name: str) -> Verdict:  # noqa: ARG002  # nothing is done to it
        """Move nothing back."""
        return Verdict.WOULD_RESTORE

    def delete(self, trashed: str, removal: Removal) -> Verdict:  # noqa: ARG002  # nothing is done to it
        """Delete nothing."""
        return Verdict.WOULD_DELETE


OpenHands = Callable[[Place], contextlib.AbstractContextManager[Hands]]
"""Called with the root of each sweep."""


@contextlib.contextmanager
def real_hands(root: Place) -> Iterator[Hands]:
    """Open the trash, and make it where there is none: early, for on a full disk there may be no room for it."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(TRASH, 0o700, dir_fd=root.fd)
    fd = open_directory(TRASH, root.fd, root.mount)
    try:
        yield Trash(root, Place(fd, root.mount))
    finally:
        os.close(fd)


@contextlib.contextmanager
def no_hands(root: Place) -> Iterator[Hands]:
    """Open the trash if there is one; nothing is written."""
    try:
        fd = open_directory(TRASH, root.fd, root.mount)
    except FileNotFoundError:
        yield NoHands(None)
        return
    try:
        yield NoHands(Place(fd, root.mount))
    finally:
        os.close(fd)
