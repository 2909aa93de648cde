"""Whose turn it is, where there may not be time for all in one sweep."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count


class Turns:
    """Remembers over sweeps what ran out of time: it comes behind all that did not, and behind what did so before."""

    def __init__(self) -> None:
        self._fresh = count(1)
        self._late: dict[str, int] = {}

    def begin(self, names: Collection[str]) -> None:
        """Begin a sweep, in which there are these alone."""
        there = frozenset(names)
        self._late = {name: place for name, place in self._late.items() if name in there}

    def place(self, name: str) -> int:
        """Return the place of a name among the others; 0 for all that have not run out of time."""
        return self._late.get(name, 0)

    def ran_out(self, name: str) -> None:
        """Let a name come last from now on."""
        self._late[name] = next(self._fresh)
