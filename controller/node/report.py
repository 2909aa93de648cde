"""Tells people what sweeps did: a table or JSON for one, log lines for many."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog

from controller.node.metrics import SweepMetrics, Tally
from controller.node.outcome import Outcome, Verdict, shown
from vcuda.tables import aligned
from vcuda.vm_directories import EXPECTED, Reason

MOST_TOLD = 1000
"""So many things that stay are told of by name; of further ones only the metric tells."""


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Return one line for each directory: its name, the verdict, and why."""
    rows = [(shown(outcome.path), outcome.verdict.value, shown(outcome.why)) for outcome in outcomes]
    return "\n".join(aligned([("DIRECTORY", "VERDICT", "WHY"), *sorted(rows)]))


def as_json(outcomes: Sequence[Outcome]) -> bytes:
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


class Teller:
    """Logs and counts the outcomes of sweeps. What stays, and should not, is told once for as long as it stays."""

    def __init__(self, metrics: SweepMetrics, log: structlog.typing.FilteringBoundLogger) -> None:
        self._metrics = metrics
        self._log = log
        self._tally = Tally()
        self._told: dict[str, Reason] = {}
        self._still: dict[str, Reason] = {}

    def begin(self) -> None:
        """Begin a sweep."""
        self._tally = Tally()
        self._still = {}

    def __call__(self, outcome: Outcome) -> None:
        """Take one outcome."""
        self._tally.add(outcome)
        self._metrics.acted(outcome)
        if outcome.verdict is not Verdict.KEPT:
            self._log.info(outcome.verdict.value, directory=shown(outcome.path), why=outcome.why, freed=outcome.freed)
        elif outcome.keep is not None and outcome.keep.reason not in EXPECTED:
            self._tell(outcome, outcome.keep.reason)

    def end(self, result: str, wall: float) -> None:
        """End a sweep: complete, blocked, unfinished or failed."""
        if result == "complete":
            self._told = self._still
        else:
            self._told |= self._still  # some were not looked at, or not as closely
        self._metrics.swept(self._tally, result, wall)

    def _tell(self, outcome: Outcome, reason: Reason) -> None:
        if outcome.path in self._told or len(self._still) < MOST_TOLD:
            self._still[outcome.path] = reason
            if self._told.get(outcome.path) is not reason:
                self._log.warning("kept", directory=shown(outcome.path), reason=reason.value, why=shown(outcome.why))
