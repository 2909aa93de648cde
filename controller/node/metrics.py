"""What the node agent tells Prometheus."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client import Counter as PromCounter

from controller.node.outcome import Outcome, Verdict
from vcuda.vm_directories import TRASH, Reason

_NO_DIRECTORIES = frozenset({Reason.FOREIGN, Reason.LINK, Reason.NOT_A_DIRECTORY})


class SweepMetrics:
    """Figures of the sweeps. Gauges are those of the last one that ended; all but ``trash`` are of the root alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._present = Gauge("vcuda_vm_directories_present", "Directories of pods in the root.", registry=registry)
        self._kept = Gauge(
            "vcuda_vm_directories_kept", "What stayed in the root, by reason.", ["reason"], registry=registry
        )
        self._trash = Gauge("vcuda_vm_trash_directories", "Directories in the trash.", registry=registry)
        self._removed = PromCounter(
            "vcuda_vm_directories_removed", "Directories moved from the root to the trash.", registry=registry
        )
        self._deleted = PromCounter(
            "vcuda_vm_directories_deleted", "Directories deleted from the trash.", registry=registry
        )
        self._freed = PromCounter("vcuda_vm_freed_bytes", "Bytes given back by deletions.", registry=registry)
        self._sweeps = PromCounter(
            "vcuda_vm_sweeps",
            "Sweeps by result: complete, blocked (nothing may or can be moved), unfinished (out of time), failed.",
            ["result"],
            registry=registry,
        )
        self._last = Gauge(
            "vcuda_vm_last_complete_sweep_timestamp_seconds",
            "When the last complete sweep ended; 0: none has.",
            registry=registry,
        )
        for result in ("complete", "blocked", "unfinished", "failed"):
            self._sweeps.labels(result)

    def acted(self, outcome: Outcome) -> None:
        """Count what was done, when it was done."""
        self._freed.inc(outcome.freed)
        if outcome.verdict is Verdict.MOVED:
            self._removed.inc()
        elif outcome.verdict is Verdict.DELETED:
            self._deleted.inc()

    def swept(self, tally: Tally, result: str, wall: float) -> None:
        """Publish the figures of a sweep; ``wall`` is when it ended, in Unix seconds."""
        self._sweeps.labels(result).inc()
        if result in ("failed", "unfinished"):
            return
        self._present.set(tally.present)
        self._trash.set(tally.trash)
        for reason in Reason:
            self._kept.labels(reason.value).set(tally.kept[reason])
        if result == "complete":
            self._last.set(wall)


class Tally:
    """Counts the outcomes of one sweep."""

    def __init__(self) -> None:
        self.present = 0
        self.trash = 0
        self.kept: Counter[Reason] = Counter()

    def add(self, outcome: Outcome) -> None:
        """Count one."""
        if outcome.path.startswith(f"{TRASH}/"):
            self.trash += outcome.verdict is Verdict.KEPT
            return
        if outcome.verdict is not Verdict.KEPT:
            self.present += outcome.verdict is Verdict.WOULD_MOVE
        elif outcome.keep is not None:
            self.kept[outcome.keep.reason] += 1
            self.present += outcome.keep.reason not in _NO_DIRECTORIES
