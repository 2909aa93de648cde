"""Sweeps the root: one pass over all the pods' directories in the root, which removes those of deleted pods."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from msgspec import structs

from controller.garbage.node import age, agent, fs, names
from controller.garbage.node.in_use import InUse, ProcessScanner, check_unused, mount_points
from controller.garbage.node.names import TRASH, Form, Keep, KeepReason, MustStay, PodPresence, Trashed, keep_after
from controller.garbage.node.pods import KubeletPods, PodSource
from controller.garbage.node.trash import Trash, open_trash
from vcuda.errors import VcudaError

# If a directory is kept for one of these reasons, nothing is wrong with the directory itself. So the next sweep tries
# again to remove it, without a delay.
_GENERAL = frozenset({KeepReason.POD, KeepReason.KUBELET, KeepReason.PODS_UNKNOWN, KeepReason.KUBELET_UNKNOWN})


def never() -> bool:
    return False


@dataclass(frozen=True)
class NodeSweep:
    """The settings of all sweeps of a node's directories, and the records that are kept between sweeps.

    ``root``, ``form``: the root (the directory with the pods' directories), and the form of the names in it.
    ``pods``, ``kubelet``: list the pods that exist.
    ``grace``: decides how long directories stay in the root.
    ``retention``: decides how long directories stay in the trash.
    ``disk_pressure``: the used share (0 to 1) of blocks or inodes above which ``retention`` is ignored.
    ``dry_run``: if True, nothing is written.
    ``sees_all``: if True, every directory is kept while any process of the host cannot be inspected.
    ``clock``: returns the present time.
    ``scanner``: finds the files that processes use.
    ``late``: trash entries whose deletion timed out, with increasing numbers. They are retried last, in this order.
    """

    root: Path
    form: Form
    pods: PodSource
    kubelet: KubeletPods | None
    grace: age.AgePolicy
    retention: age.AgePolicy
    disk_pressure: float = 0.85
    dry_run: bool = False
    sees_all: bool = False
    clock: Callable[[], age.Now] = lambda: age.Now(time.time(), time.monotonic())
    scanner: ProcessScanner = field(default_factory=ProcessScanner)
    late: dict[str, int] = field(default_factory=dict)

    def run(
        self, report: agent.Report, give_up: Callable[[], bool] = never, stopping: Callable[[], bool] = never
    ) -> Keep | None:
        """Make one sweep. Return why nothing could be removed; None if the sweep was complete.

        If the root does not exist, there is nothing to sweep.

        ``give_up``: returns True when the sweep has used up its time. The sweep tries at least one directory of the
        root and one of the trash, so that a slow disk cannot stop all progress. If the time ends during a scan of the
        processes, the scan continues in its thread for a later sweep.
        ``stopping``: returns True when the process stops. It is called before every step.

        Raises OSError if the root cannot be read. Raises OutOfTime if the sweep ended early. A later sweep continues.
        """
        presence = self._presence()
        with ExitStack() as stack:
            try:
                root = stack.enter_context(fs.opened_root(self.root))
            except FileNotFoundError:
                return presence.unknown
            trash = self._trash(root, presence, stack)
            if isinstance(trash, Keep):
                presence = structs.replace(presence, unknown=trash)
                for entry in _but_trash(root):
                    keep = names.keep_in_root(self.form, entry.name, entry.kind, presence)
                    report(agent.DirectoryOutcome(entry.name, agent.Action.KEPT, keep))
                return trash
            SweepRun(self, root, presence, trash, report, give_up, stopping).over_all()
        return None

    def _trash(self, root: fs.OpenDirectory, presence: PodPresence, stack: ExitStack) -> Trash | Keep:
        try:
            return presence.unknown or stack.enter_context(open_trash(root, dry_run=self.dry_run))
        except (OSError, MustStay) as error:
            keep = keep_after(error)
            return Keep(keep.reason, f"{TRASH}: {keep.detail}")

    def _presence(self) -> PodPresence:
        pods: frozenset[str] = frozenset()
        try:
            pods = self.pods.known()
            return PodPresence(pods, self.kubelet.uids() if self.kubelet else None)
        except VcudaError as error:
            return PodPresence(pods, None, keep_after(error))


def _but_trash(root: fs.OpenDirectory) -> Iterator[fs.DirectoryEntry]:
    return (entry for entry in fs.entries(root.fd) if entry.name != TRASH)


@dataclass
class SweepRun:
    """One running sweep (a pass over all directories). `NodeSweep.run` describes ``give_up`` and ``stopping``."""

    sweep: NodeSweep
    root: fs.OpenDirectory
    presence: PodPresence
    trash: Trash
    report: agent.Report
    give_up: Callable[[], bool]
    stopping: Callable[[], bool]

    @cached_property
    def in_use(self) -> InUse:
        """The files and mounts that processes use. They are scanned once per sweep, when they are first needed."""
        return self.sweep.scanner.scan(self.root.mount, self.give_up, self.stopping)

    def over_all(self) -> None:
        """Sweep --root, and then the trash. Sweep the trash even if the sweep of --root has taken all the time."""
        try:
            self.over_root()
        except fs.OutOfTime:
            if not self.stopping():
                self.over_trash()
            raise
        self.over_trash()

    def over_root(self) -> None:
        self.sweep.grace.begin(self.sweep.clock())
        gone: list[fs.DirectoryEntry] = []
        for entry in _but_trash(self.root):
            keep = names.keep_in_root(self.sweep.form, entry.name, entry.kind, self.presence)
            if keep is None and len(gone) < age.MAX_TRACKED:
                gone.append(entry)
            else:
                self._report_kept(entry.name, keep or Keep(KeepReason.TOO_MANY))
        mounted = mount_points()
        found = [(entry.name, self._may_go(entry, mounted)) for entry in gone]
        self._in_turn([partial(self._move, name, identity) for name, identity in found if identity])

    def _may_go(self, entry: fs.DirectoryEntry, mounted: frozenset[str]) -> fs.Identity | None:
        # Return the identity (device and inode) of an entry that may be removed. All entries are checked before the
        # first is moved, so that a sweep that ends early has still found every entry, as the age policy requires. A
        # mount point is not accessed, because its file system may hang.
        if entry.name in mounted:
            self._report_kept(entry.name, Keep(KeepReason.MOUNT, entry.name))
            return None
        try:
            about = os.stat(entry.name, dir_fd=self.root.fd, follow_symlinks=False)
            keep = self.sweep.grace.hold(entry.name, about.st_ino, about.st_mtime)
        except FileNotFoundError:
            return None  # Another process has removed the directory.
        except OSError as error:
            keep = keep_after(error)
        if keep is None:
            return fs.Identity(about.st_dev, about.st_ino)
        self._report_kept(entry.name, keep)
        return None

    def _in_turn(self, steps: Sequence[Callable[[], None]]) -> None:
        # Handle the first entry even if the time of the sweep is over, so that every sweep makes progress.
        for number, step in enumerate(steps):
            if self.stopping() or (number and self.give_up()):
                raise fs.OutOfTime
            step()

    def _move(self, name: str, identity: fs.Identity) -> None:
        try:
            self.report(agent.DirectoryOutcome(name, self._take(name, identity)))
        except (VcudaError, OSError) as error:
            self._put_off(self.sweep.grace, name, name, error)

    def _take(self, name: str, identity: fs.Identity) -> agent.Action:
        # Check the directory again, because its pod or its use may have changed since the first check. Then move it.
        uid = self.sweep.form.uid(name) or ""
        # `_check_names` may wait long for the scan of the processes. So check the pod afterwards, with a recent list.
        self._check_names({name, uid})
        if uid in self.sweep.pods.confirmed():
            raise MustStay(KeepReason.POD)
        if self.sweep.kubelet:
            self.sweep.kubelet.check_gone(uid)
        with fs.opened(self.root, name) as fd:
            if fs.identity_of(fd) != identity:
                raise MustStay(KeepReason.CHANGED)
            self._check_unused(fd)
            return self.trash.take(name, fd, int(self.sweep.clock().wall))

    def over_trash(self) -> None:
        trash = self.trash.directory
        if trash is None:
            return
        self.sweep.retention.begin(self.sweep.clock())
        found: list[tuple[Trashed, fs.DirectoryEntry]] = []
        for entry in islice(fs.entries(trash.fd), age.MAX_TRACKED):
            trashed = self.sweep.form.read_trashed(entry.name)
            if trashed is None or not (trashed.moving or entry.kind.may_be_directory):
                self._report_kept(f"{TRASH}/{entry.name}", Keep(KeepReason.FOREIGN))
            else:
                found.append((trashed, entry))
        late = self.sweep.late
        for gone in late.keys() - {entry.name for _, entry in found}:
            del late[gone]
        # Delete the oldest entries of the trash first. Entries whose deletion timed out in an earlier sweep come last.
        found.sort(key=lambda each: (late.get(each[1].name, 0), each[0].time))
        self._in_turn([partial(self._delete, trash, *each) for each in found if self._may_be_deleted(*each)])

    def _may_be_deleted(self, trashed: Trashed, entry: fs.DirectoryEntry) -> bool:
        # A trash entry is moved back if its pod exists or its move was interrupted. Otherwise, `retention` decides.
        path = f"{TRASH}/{entry.name}"
        keep = Keep(KeepReason.INTERRUPTED) if trashed.moving else names.keep_for_pod(trashed.uid, self.presence)
        if keep is not None:
            self._give_back(path, trashed, entry, keep)
            return False
        keep = self.sweep.retention.hold(entry.name, entry.inode, trashed.time)
        if keep is None or (keep.reason is KeepReason.YOUNG and self._pressed()):
            return True
        self._report_kept(path, Keep(KeepReason.RETAINED) if keep.reason is KeepReason.YOUNG else keep)
        return False

    def _give_back(self, path: str, trashed: Trashed, entry: fs.DirectoryEntry, keep: Keep) -> None:
        try:
            self.report(agent.DirectoryOutcome(path, self.trash.give_back(entry.name, trashed.name)))
        except FileExistsError:
            self._report_kept(path, keep)
        except OSError as error:
            self._report_kept(path, keep_after(error))

    def _delete(self, trash: fs.OpenDirectory, trashed: Trashed, entry: fs.DirectoryEntry) -> None:
        path = f"{TRASH}/{entry.name}"
        removal = fs.TreeRemoval(trash, self.give_up, self.stopping)
        try:
            self._check_names({entry.name, trashed.name, trashed.uid})
            with fs.opened(trash, entry.name) as fd:
                self._check_unused(fd)
            verdict = self.trash.delete(entry.name, removal)
            self.report(agent.DirectoryOutcome(path, verdict, freed=removal.freed))
        except fs.OutOfTime:
            self.sweep.late[entry.name] = max(self.sweep.late.values(), default=0) + 1
            self._report_kept(path, Keep(KeepReason.TOO_MANY), removal.freed)
            raise
        except (VcudaError, OSError) as error:
            self._put_off(self.sweep.retention, entry.name, path, error, removal.freed)

    def _check_names(self, any_of: set[str]) -> None:
        mounted, named = any_of & self.in_use.mounted, any_of & self.in_use.named
        if mounted:
            raise MustStay(KeepReason.MOUNT, min(mounted))
        if named:
            raise MustStay(KeepReason.OPEN, min(named))

    def _check_unused(self, fd: int) -> None:
        check_unused(fd, self.root.mount, self.in_use, self.stopping, self.sweep.form.own_socket)
        if self.sweep.sees_all and self.in_use.unseen:
            raise MustStay(KeepReason.UNSEEN, f"process {self.in_use.unseen[0]}")

    def _pressed(self) -> bool:
        # Compute the used share of the disk as df(1) does, without the blocks that are reserved for root.
        found = os.fstatvfs(self.root.fd)
        used = found.f_blocks - found.f_bfree
        blocks = used / max(1, used + found.f_bavail)
        inodes = (found.f_files - found.f_ffree) / max(1, found.f_files)
        return max(blocks, inodes) > self.sweep.disk_pressure

    def _put_off(
        self, policy: age.AgePolicy, name: str, path: str, error: VcudaError | OSError, freed: int = 0
    ) -> None:
        keep = keep_after(error)
        if keep.reason not in _GENERAL:
            policy.put_off(name, keep)
        self._report_kept(path, keep, freed)

    def _report_kept(self, path: str, keep: Keep, freed: int = 0) -> None:
        self.report(agent.DirectoryOutcome(path, agent.Action.KEPT, keep, freed))
