"""Sweeps the root: one pass over all the pods' directories in the root, which deletes those of deleted pods."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from controller.garbage.node import age, agent, fs
from controller.garbage.node.names import Form, Keep, KeepReason, keep_after
from controller.garbage.node.pods import Evidence, Presence
from vcuda.errors import VcudaError


@dataclass(frozen=True)
class NodeSweep:
    """The settings of all sweeps of a node's directories.

    ``root``, ``form``: the root (the directory with the pods' directories), and the form of the names in it.
    ``evidence``: reads which pods exist.
    ``grace``: decides how long directories stay.
    ``dry_run``: if True, nothing is written.
    ``clock``: returns the present time.
    """

    root: Path
    form: Form
    evidence: Evidence
    grace: age.ObservedAge
    dry_run: bool = False
    clock: Callable[[], age.Now] = lambda: age.Now(time.time(), time.monotonic())

    def run(self, report: agent.Report, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> Keep | None:
        """Make one sweep. Return why nothing could be deleted; None if the sweep was complete.

        If the root does not exist, there is nothing to sweep.

        ``give_up``: returns True when the sweep has used up its time. The sweep tries to delete at least one directory,
        and completes each deletion, so that a slow disk cannot stop all progress.
        ``stopping``: returns True when the process stops. It is called before every step of a deletion.

        Raises OSError if the root cannot be read. Raises OutOfTime if the sweep ended early. A later sweep continues.
        """
        presence: Presence | Keep
        try:
            presence = self.evidence.read()
        except VcudaError as error:
            presence = keep_after(error)
        unknown = presence if isinstance(presence, Keep) else None
        with contextlib.ExitStack() as stack:
            try:
                root = stack.enter_context(fs.opened_root(self.root))
            except FileNotFoundError:
                return unknown
            # All entries are checked before the first deletion, so that a sweep that ends early has still found every
            # entry, as the age policy requires.
            for number, (name, found) in enumerate(self._unused(root, presence, report).items()):
                if stopping() or (number and give_up()):
                    raise fs.OutOfTime
                if outcome := self._delete(root, name, found, stopping):
                    report(outcome)
        return unknown

    def _unused(
        self, root: fs.OpenDirectory, presence: Presence | Keep, report: agent.Report
    ) -> dict[str, os.stat_result]:
        if isinstance(presence, Presence):
            self.grace.begin(self.clock())
        mounted = fs.mounted_in(root)
        unused = {}
        with os.scandir(root.fd) as entries:
            for entry in entries:
                try:
                    keep = self._keep(entry, presence, mounted)
                    if keep is None:
                        unused[entry.name] = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # Another process has deleted the entry.
                except OSError as error:
                    keep = keep_after(error)
                if keep is not None:
                    report(agent.DirectoryOutcome(entry.name, agent.Action.KEPT, keep))
        return unused

    def _keep(self, entry: os.DirEntry[str], presence: Presence | Keep, mounted: frozenset[str]) -> Keep | None:
        """Return why an entry of the root must be kept; None if it is an old directory of a pod that does not exist."""
        uid = self.form.uid(entry.name)
        if uid is None:
            return Keep(KeepReason.FOREIGN)
        if entry.name in mounted:  # The file system of a mount point is not accessed, because it may hang.
            return Keep(KeepReason.MOUNT)
        if not entry.is_dir(follow_symlinks=False):
            return Keep(KeepReason.LINK if entry.is_symlink() else KeepReason.NOT_A_DIRECTORY)
        if isinstance(presence, Keep):
            return presence
        found = entry.stat(follow_symlinks=False)
        return presence.keep(uid) or self.grace.hold(entry.name, found.st_ino, found.st_mtime)

    def _delete(
        self, root: fs.OpenDirectory, name: str, found: os.stat_result, stopping: Callable[[], bool]
    ) -> agent.DirectoryOutcome | None:
        removal = fs.TreeRemoval(root, stopping)
        try:
            # The pod may have been created or restored since the first check. kubelet's directory is read last.
            keep = self.evidence.read(live=True).keep(self.form.uid(name) or "")
            with fs.opened(root, name) as directory:
                if not os.path.samestat(os.fstat(directory.fd), found):
                    keep = Keep(KeepReason.CHANGED)
                if keep is None and not self.dry_run:
                    removal.remove(name, directory)
        except FileNotFoundError:
            return None  # Another process has deleted the directory, or a file in it. A later sweep handles the rest.
        except (VcudaError, OSError) as error:
            keep = keep_after(error)
        action = agent.Action.WOULD_DELETE if self.dry_run else agent.Action.DELETED
        return agent.DirectoryOutcome(name, agent.Action.KEPT if keep else action, keep, removal.freed)
