"""The trash: a subdirectory into which the directories of deleted pods are moved before they are deleted.

A move consists of two renames. The first rename gives the directory a name that ends in ``.moving``. The second gives
it the final name, but only if it is the directory that the agent has checked. Another process may have replaced that
directory, or the agent may be killed between the renames. A directory with a ``.moving`` name is therefore moved back.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from controller.garbage.node import agent, fs, names


@dataclass(frozen=True, slots=True)
class Trash:
    """Moves directories to the trash and back, and deletes them. With ``dry_run``, the methods change nothing.

    ``root``: the directory with the pods' directories. ``directory``: the trash; None in a dry run if there is none.
    Each method returns the action that it took, or that it would take without ``dry_run``. It raises OSError if a step
    fails, and MustStay if the directory must be kept.
    """

    root: fs.OpenDirectory
    directory: fs.OpenDirectory | None
    dry_run: bool = False

    def take(self, name: str, fd: int, time: int) -> agent.Action:
        """Move a directory from --root into the trash. ``fd``: the checked directory. ``time``: now, in Unix seconds.

        If another process has replaced the directory, the new directory is moved back, and MustStay is raised.
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
        """Move a directory from the trash back to ``name`` in --root. Raises FileExistsError if ``name`` exists."""
        if self.dry_run or self.directory is None:
            return agent.Action.WOULD_RESTORE
        fs.rename(trashed, self.directory.fd, name, self.root.fd)
        return agent.Action.RESTORED

    def delete(self, trashed: str, removal: fs.TreeRemoval) -> agent.Action:
        if self.dry_run:
            return agent.Action.WOULD_DELETE
        removal.remove(trashed)
        return agent.Action.DELETED


@contextlib.contextmanager
def open_trash(root: fs.OpenDirectory, *, dry_run: bool = False) -> Iterator[Trash]:
    """Open the trash. If it does not exist, create it, except in a dry run."""
    # Create the trash even before a directory must be moved, because a full disk may have no room for it later.
    with contextlib.suppress(FileExistsError):
        if not dry_run:
            os.mkdir(names.TRASH, 0o700, dir_fd=root.fd)
    with contextlib.ExitStack() as stack:
        directory = None
        try:
            directory = fs.OpenDirectory(stack.enter_context(fs.opened(root, names.TRASH)), root.mount)
        except FileNotFoundError:
            if not dry_run:
                raise
        yield Trash(root, directory, dry_run)
