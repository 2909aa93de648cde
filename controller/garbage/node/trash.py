"""The trash beside the directories: what is to be deleted is moved there first, and stays for a while.

A move is two renames. The first gives a name that ends in ``.moving``; only what then proves to be the very directory
that was checked gets its final name. So whoever exchanges it in between, and whenever the process is killed: what has
the final name was checked, and what has the other goes back to where it was.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from controller.garbage.node import agent, fs, names


@dataclass(frozen=True, slots=True)
class Trash:
    """``directory`` is the open trash, None where there is none; with ``dry_run`` all methods only say what they would.

    Each raises OSError where a step fails, and MustStay where something has to stay.
    """

    root: fs.OpenDirectory
    directory: fs.OpenDirectory | None
    dry_run: bool = False

    def take(self, name: str, fd: int, time: int) -> agent.Action:
        """Move a directory from the root, open as ``fd``, into the trash; ``time`` is in Unix seconds.

        MustStay where it was exchanged meanwhile: what is there then goes back.
        """
        if self.dry_run or self.directory is None:
            return agent.Action.WOULD_MOVE
        moving, trash = names.moving_name(name, time), self.directory.fd
        fs.rename(name, self.root.fd, moving, trash)
        if fs.identity_at(moving, trash) != fs.identity_of(fd):
            fs.rename(moving, trash, name, self.root.fd)
            raise names.MustStay(names.KeepReason.CHANGED)
        fs.rename(moving, trash, names.trash_name(name, time), trash)
        return agent.Action.MOVED

    def give_back(self, trashed: str, name: str) -> agent.Action:
        """Move something from the trash back to its name; FileExistsError where that is taken."""
        if self.dry_run or self.directory is None:
            return agent.Action.WOULD_RESTORE
        fs.rename(trashed, self.directory.fd, name, self.root.fd)
        return agent.Action.RESTORED

    def delete(self, trashed: str, removal: fs.TreeRemoval) -> agent.Action:
        """Delete something in the trash for good."""
        if self.dry_run:
            return agent.Action.WOULD_DELETE
        removal.remove(trashed)
        return agent.Action.DELETED


@contextlib.contextmanager
def open_trash(root: fs.OpenDirectory, *, dry_run: bool = False) -> Iterator[Trash]:
    """Open the trash, and make it where there is none; with ``dry_run`` nothing is written, not even that."""
    # Made before anything is to be moved: on a full disk there may be no room for it later.
    with contextlib.suppress(FileExistsError):
        if not dry_run:
            os.mkdir(names.TRASH, 0o700, dir_fd=root.fd)
    try:
        fd = fs.open_directory(names.TRASH, root.fd, root.mount)
    except FileNotFoundError:
        if not dry_run:
            raise
        yield Trash(root, None, dry_run)
        return
    try:
        yield Trash(root, fs.OpenDirectory(fd, root.mount), dry_run)
    finally:
        os.close(fd)
