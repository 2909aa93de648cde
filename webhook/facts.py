"""What decisions are made from besides the pod itself: the quota in force, the nodes, and the system's settings."""

from __future__ import annotations

from typing import Protocol

import msgspec

from vcuda.patches import Hints
from vcuda.placement import Nodes
from vcuda.quota import Quota


class Facts(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision."""

    quota: Quota
    nodes: Nodes
    hints: Hints = Hints()


class FactsSource(Protocol):
    """Where the facts come from: watched in a cluster, read from files where there is none."""

    def current(self) -> Facts | None:
        """Return the facts in force, or None until the quota has been read once."""


class FixedFacts:
    """Facts that do not change: for the embedded mode and `check`."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def current(self) -> Facts | None:
        """Return the facts given at the start."""
        return self._facts
