"""Runs the node agent, which periodically deletes directories of deleted pods: its loop, logs and metrics."""

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter as PromCounter, Gauge

from controller.garbage.node import fs, names
from vcuda.cli import escaped
from vcuda.kube.metrics import register_build

# The agent sweeps again after at most this time if it could delete nothing, for example without the API server.
BLOCKED_PERIOD_SECONDS = 5.0

# The agent reports that it is unhealthy if no sweep of the directories has ended for this many sweep periods.
MAX_MISSED_PERIODS = 5

# The maximum number of kept directories that are logged by name. A metric counts all kept directories.
MAX_LOGGED = 1000


class Action(names.Explained):
    """The action of a sweep (a pass over all directories) on a directory. The values are part of the log."""

    KEPT = "kept", ""
    DELETED = "deleted", "the pod does not exist"
    WOULD_DELETE = "would delete", DELETED[1]


class DirectoryOutcome(msgspec.Struct, frozen=True):
    """The action of a sweep on one directory, and its reason.

    ``path``: the path relative to --root, from os.fsdecode. Print it only with `escaped`, because it may contain
    control characters and bytes that are not UTF-8.
    ``keep``: why the directory was kept; None if it was not kept.
    ``freed``: the number of freed bytes.
    """

    path: str
    verdict: Action
    keep: names.Keep | None = None
    freed: int = 0

    @property
    def why(self) -> str:
        return str(self.keep) if self.keep else self.verdict.why


Report = Callable[[DirectoryOutcome], None]
"""A function that a sweep calls with the outcome for each entry of --root, the directory with the pods' directories."""

Run = Callable[[Report, Callable[[], bool], Callable[[], bool]], names.Keep | None]

_NO_DIRECTORIES = frozenset({names.KeepReason.FOREIGN, names.KeepReason.LINK, names.KeepReason.NOT_A_DIRECTORY})


class SweepMetrics:
    """Metrics of the sweeps of a node's directories. The gauges describe the last sweep that saw all directories."""

    def __init__(self, registry: CollectorRegistry) -> None:
        register_build(registry)
        self._present = Gauge("vcuda_vm_directories_present", "Directories of pods in --root.", registry=registry)
        self._kept = Gauge(
            "vcuda_vm_directories_kept", "Entries kept in --root, by reason.", ["reason"], registry=registry
        )
        self._deleted = PromCounter(
            "vcuda_vm_directories_deleted", "Directories of pods that were deleted.", registry=registry
        )
        self._freed = PromCounter("vcuda_vm_freed_bytes", "Bytes freed by deletions.", registry=registry)
        self._sweeps = PromCounter(
            "vcuda_vm_sweeps",
            "Sweeps by result: complete, blocked (nothing could be deleted), unfinished (out of time), failed.",
            ["result"],
            registry=registry,
        )
        self._last = Gauge(
            "vcuda_vm_last_complete_sweep_timestamp_seconds",
            "End of the last complete sweep in Unix seconds; 0 if there was none.",
            registry=registry,
        )
        # Create every series of this metric with the value 0. Otherwise rate() in Prometheus misses the first increase.
        for result in ("complete", "blocked", "unfinished", "failed"):
            self._sweeps.labels(result)
        self.begin()

    def begin(self) -> None:
        self._directories = 0
        self._reasons: Counter[names.KeepReason] = Counter()

    def add(self, outcome: DirectoryOutcome) -> None:
        """Count the outcome for one directory immediately, because it is true even if the sweep fails later."""
        self._freed.inc(outcome.freed)
        self._deleted.inc(outcome.verdict is Action.DELETED)
        if outcome.keep is not None:
            self._reasons[outcome.keep.reason] += 1
        self._directories += outcome.verdict is not Action.DELETED and (
            outcome.keep is None or outcome.keep.reason not in _NO_DIRECTORIES
        )

    def end(self, result: str, wall: float) -> None:
        """Publish the metrics of the sweep that has ended. ``wall``: when the sweep ended, in Unix seconds."""
        self._sweeps.labels(result).inc()
        # A failed or unfinished sweep may have missed directories that exist. So the gauges keep their old values.
        if result in ("failed", "unfinished"):
            return
        self._present.set(self._directories)
        for reason in names.KeepReason:
            self._kept.labels(reason.value).set(self._reasons[reason])
        if result == "complete":
            self._last.set(wall)


class SweepReporter:
    """Logs and counts the outcomes of sweeps. A directory is logged once per reason if a person must act."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = SweepMetrics(registry)
        self._log = structlog.get_logger()
        self._logged: dict[str, names.KeepReason] = {}
        self._kept: dict[str, names.KeepReason] = {}

    def begin(self) -> None:
        self._metrics.begin()
        self._kept = {}

    def __call__(self, outcome: DirectoryOutcome) -> None:
        self._metrics.add(outcome)
        directory, why = escaped(outcome.path), escaped(outcome.why)
        if outcome.verdict is not Action.KEPT:
            self._log.info(outcome.verdict.value, directory=directory, why=why, freed=outcome.freed)
        elif outcome.keep is not None and not outcome.keep.reason.is_expected:
            reason = outcome.keep.reason
            if outcome.path in self._logged or len(self._kept) < MAX_LOGGED:
                self._kept[outcome.path] = reason
                if self._logged.get(outcome.path) is not reason:
                    self._log.warning("kept", directory=directory, reason=reason.value, why=why)

    def end(self, result: str, wall: float) -> None:
        """Count an ended sweep. ``result``: complete, blocked (nothing could be deleted), unfinished, or failed."""
        # If the sweep may have missed directories, keep their earlier records, so that they are not logged twice.
        self._logged = self._kept if result == "complete" else self._logged | self._kept
        self._metrics.end(result, wall)


class Agent:
    """Sweeps the pods' directories until it is stopped.

    ``run``: makes one sweep (see `NodeSweep.run`).
    ``stop``: an entry in this queue stops the agent. Signal handlers add the entry, and in a signal handler only a
    SimpleQueue is safe (see Python's documentation of `queue`).
    ``period``: the seconds between two sweeps, and the time after which a sweep begins no other deletion.
    """

    def __init__(
        self, run: Run, reporter: SweepReporter, stop: "queue.SimpleQueue[None]", period: float = 60.0
    ) -> None:
        self._run = run
        self._reporter = reporter
        self._stop = stop
        self._period = period
        self._ended = time.monotonic()
        self._log = structlog.get_logger()
        self._blocked: names.Keep | None = None
        self.ready = False

    def loop(self) -> None:
        """Sweep and wait in turn until the agent is stopped. If a sweep could delete nothing, wait only briefly."""
        while self._stop.empty():
            self.sweep()
            with contextlib.suppress(queue.Empty):
                self._stop.get(timeout=min(self._period, BLOCKED_PERIOD_SECONDS) if self._blocked else self._period)
                return

    def sweep(self) -> None:
        deadline = time.monotonic() + self._period
        self._reporter.begin()
        result = self._result(lambda: time.monotonic() > deadline)
        self._reporter.end(result, time.time())
        self.ready = self.ready or result in ("complete", "unfinished")
        if result != "failed":
            self._ended = time.monotonic()

    def unhealthy(self) -> str | None:
        # A sweep that could not reach the API server counts as ended, too: a restart of the agent would not help.
        silent = time.monotonic() - self._ended
        too_long = silent > MAX_MISSED_PERIODS * self._period
        return f"no sweep has ended for {silent:.0f} s" if too_long else None

    def _result(self, give_up: Callable[[], bool]) -> str:
        try:
            blocked = self._run(self._reporter, give_up, lambda: not self._stop.empty())
        except fs.OutOfTime:
            return "unfinished"
        except OSError as error:
            self._log.error("the sweep of the pods' directories failed", error=str(error))
            return "failed"
        if blocked != self._blocked:
            if blocked:
                self._log.warning("no directory can be deleted", why=str(blocked))
            else:
                self._log.info("directories can be deleted again")
        self._blocked = blocked
        return "blocked" if blocked else "complete"
