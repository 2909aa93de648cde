"""What a sweep tells, how that is shown and counted, and the loop: a sweep each period, or when a pod has gone."""

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter as PromCounter, Gauge

from controller.garbage.node import fs, names
from vcuda.cli import aligned

# After a sweep the next that an event brings is so long away: a thousand pods that end together make no storm.
MIN_INTERVAL_SECONDS = 5.0

# After so many periods in which no sweep has ended the agent is not healthy.
MAX_MISSED_PERIODS = 5

# So many things that stay are logged by name; of further ones only the metric tells.
MAX_TOLD = 1000


class Action(names.Explained):
    """What was done; the values are what people read."""

    KEPT = "kept", ""
    MOVED = "moved", "its pod is gone"
    DELETED = "deleted", "its time in the trash is over"
    RESTORED = "restored", "its pod exists, or its move was interrupted"
    WOULD_MOVE = "would move", MOVED[1]
    WOULD_DELETE = "would delete", DELETED[1]
    WOULD_RESTORE = "would restore", RESTORED[1]


class DirectoryOutcome(msgspec.Struct, frozen=True):
    """``path`` is relative to the root; ``keep`` tells why it was kept; ``freed`` is in bytes.

    The path may hold bytes that are no UTF-8, as os.fsdecode gives them, and control characters: see `shown`.
    """

    path: str
    verdict: Action
    keep: names.Keep | None = None
    freed: int = 0

    @property
    def why(self) -> str:
        """The reason as a clause."""
        return str(self.keep) if self.keep else self.verdict.why


Report = Callable[[DirectoryOutcome], None]
"""Told of everything in the root and in the trash, once a sweep."""


def shown(text: str) -> str:
    """Return a name that came from a disk as plain text: what a terminal might obey, or JSON not hold, is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def as_table(outcomes: Sequence[DirectoryOutcome]) -> str:
    """Return one line for each directory: its name, the verdict, and why."""
    rows = [(shown(outcome.path), outcome.verdict.value, shown(outcome.why)) for outcome in outcomes]
    return "\n".join(aligned([("DIRECTORY", "VERDICT", "WHY"), *sorted(rows)]))


def as_json(outcomes: Sequence[DirectoryOutcome]) -> bytes:
    """Return a JSON array of objects with directory, verdict, reason (of what is kept), why, and freedBytes."""
    rows = [
        {
            "directory": shown(outcome.path),
            "verdict": outcome.verdict.value,
            "reason": outcome.keep.reason.value if outcome.keep else None,
            "why": shown(outcome.why),
            "freedBytes": outcome.freed,
        }
        for outcome in sorted(outcomes, key=lambda each: each.path)
    ]
    return msgspec.json.encode(rows)


_NO_DIRECTORIES = frozenset({names.KeepReason.FOREIGN, names.KeepReason.LINK, names.KeepReason.NOT_A_DIRECTORY})


class SweepMetrics:
    """Figures of the sweeps. Gauges are those of the last one that ended; all but the trash's are of the root alone."""

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
        # A series that is not there yet looks to a query like one that does not exist: rate() would miss the first.
        for result in ("complete", "blocked", "unfinished", "failed"):
            self._sweeps.labels(result)
        self.begin()

    def begin(self) -> None:
        """Begin to count a sweep."""
        self._directories = self._in_trash = 0
        self._reasons: Counter[names.KeepReason] = Counter()

    def add(self, outcome: DirectoryOutcome) -> None:
        """Count one outcome. What was done is published at once: a sweep that fails later has done it all the same."""
        self._freed.inc(outcome.freed)
        self._removed.inc(outcome.verdict is Action.MOVED)
        self._deleted.inc(outcome.verdict is Action.DELETED)
        if outcome.path.startswith(f"{names.TRASH}/"):
            self._in_trash += outcome.verdict is Action.KEPT
        elif outcome.verdict is not Action.KEPT:
            self._directories += outcome.verdict is Action.WOULD_MOVE
        elif outcome.keep is not None:
            self._reasons[outcome.keep.reason] += 1
            self._directories += outcome.keep.reason not in _NO_DIRECTORIES

    def end(self, result: str, wall: float) -> None:
        """Publish the figures of the sweep; ``wall`` is when it ended, in Unix seconds."""
        self._sweeps.labels(result).inc()
        # A sweep that came to no end has not seen everything: its figures would look as if directories had gone.
        if result in ("failed", "unfinished"):
            return
        self._present.set(self._directories)
        self._trash.set(self._in_trash)
        for reason in names.KeepReason:
            self._kept.labels(reason.value).set(self._reasons[reason])
        if result == "complete":
            self._last.set(wall)


class SweepReporter:
    """Logs and counts the outcomes of sweeps. What stays, and should not, is told once for as long as it stays."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = SweepMetrics(registry)
        self._log = structlog.get_logger()
        self._told: dict[str, names.KeepReason] = {}
        self._still: dict[str, names.KeepReason] = {}

    def begin(self) -> None:
        """Begin a sweep."""
        self._metrics.begin()
        self._still = {}

    def __call__(self, outcome: DirectoryOutcome) -> None:
        """Take one outcome."""
        self._metrics.add(outcome)
        directory, why = shown(outcome.path), shown(outcome.why)
        if outcome.verdict is not Action.KEPT:
            self._log.info(outcome.verdict.value, directory=directory, why=why, freed=outcome.freed)
        elif outcome.keep is not None and not outcome.keep.reason.is_expected:
            reason = outcome.keep.reason
            if outcome.path in self._told or len(self._still) < MAX_TOLD:
                self._still[outcome.path] = reason
                if self._told.get(outcome.path) is not reason:
                    self._log.warning("kept", directory=directory, reason=reason.value, why=why)

    def end(self, result: str, wall: float) -> None:
        """End a sweep: complete, blocked, unfinished or failed."""
        # Of a sweep that was not complete some were not looked at, or not as closely: they may stay still.
        self._told = self._still if result == "complete" else self._told | self._still
        self._metrics.end(result, wall)


Run = Callable[[Report, Callable[[], bool], Callable[[], bool]], names.Keep | None]
"""`controller.garbage.node.sweep.NodeSweep.run`, or what stands for it."""


@dataclass(frozen=True, slots=True)
class SweepInterval:
    """``period`` between sweeps, ``spacing`` at least, in seconds."""

    period: float = 60.0
    spacing: float = MIN_INTERVAL_SECONDS


class Wakeup:
    """Ends a wait, from any thread or signal handler."""

    def __init__(self) -> None:
        self.stopping = False
        # Of Python's queues and events only this one may be put to by a signal handler (its documentation, queue).
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Let a sweep come soon."""
        self._queue.put(None)

    def stop(self) -> None:
        """Let the loop end."""
        self.stopping = True
        self._queue.put(None)

    def wait(self, interval: SweepInterval) -> None:
        """Return after a period, or after an event and the spacing, or at once when stopping."""
        began = time.monotonic()
        seconds = interval.period
        with contextlib.suppress(queue.Empty):
            while not self.stopping:
                self._queue.get(timeout=max(0.0, seconds))
                seconds = began + min(interval.spacing, interval.period) - time.monotonic()


class Agent:
    """Sweeps until it is stopped. A sweep that takes longer than a period makes a pause, and another goes on."""

    def __init__(self, run: Run, reporter: SweepReporter, wakeup: Wakeup, interval: SweepInterval) -> None:
        self._run = run
        self._reporter = reporter
        self._wakeup = wakeup
        self._interval = interval
        self._ended = time.monotonic()
        self._log = structlog.get_logger()
        self._blocked: names.Keep | None = None

    def loop(self) -> None:
        """Sweep and wait, until ``wakeup`` stops it; what was blocked is tried again soon."""
        soon = SweepInterval(min(self._interval.period, self._interval.spacing), 0)
        while not self._wakeup.stopping:
            self.sweep()
            self._wakeup.wait(soon if self._blocked else self._interval)

    def sweep(self) -> None:
        """Make one pass, whatever comes of it."""
        deadline = time.monotonic() + self._interval.period
        self._reporter.begin()
        result = self._result(lambda: time.monotonic() > deadline)
        self._reporter.end(result, time.time())
        if result != "failed":
            self._ended = time.monotonic()

    def unhealthy(self) -> str | None:
        """Return what is wrong where no sweep has ended for too long, else None."""
        # One that did nothing, because the API server is not heard, has ended too: a new agent would hear it no better.
        silent = time.monotonic() - self._ended
        too_long = silent > MAX_MISSED_PERIODS * self._interval.period
        return f"no sweep has ended for {silent:.0f} s" if too_long else None

    def _result(self, give_up: Callable[[], bool]) -> str:
        try:
            blocked = self._run(self._reporter, give_up, lambda: self._wakeup.stopping)
        except fs.OutOfTime:
            return "unfinished"
        except OSError as error:
            self._log.error("sweep failed", error=str(error))
            return "failed"
        if blocked != self._blocked:
            if blocked:
                self._log.warning("nothing is removed", why=str(blocked))
            else:
                self._log.info("removing again")
        self._blocked = blocked
        return "blocked" if blocked else "complete"
