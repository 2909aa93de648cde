"""Decides to which team a namespace belongs.

A team lists its members by names, and by beginnings of names that end with ``*``. The most exact item decides: a name
before a beginning, and a longer beginning before a shorter one. The order of the teams and of their items is ignored.
"""

import functools
from collections.abc import Mapping

import msgspec


class Members(msgspec.Struct, frozen=True, dict=True):
    """The members of all teams. No item may be listed twice."""

    items: Mapping[str, tuple[str, ...]] = {}
    """The names and beginnings that each team lists, by the name of the team."""

    def team_of(self, namespace: str) -> str | None:
        """Return the name of the team to which the namespace belongs; None if it belongs to no team."""
        # Each create of a pod asks this. The time does not grow with the number of teams, because the beginnings have
        # at most 62 different lengths.
        if (team := self.names.get(namespace)) is not None:
            return team
        for length in self._lengths:
            if (team := self._beginnings.get(namespace[:length])) is not None:
                return team
        return None

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """The team of each namespace that a team lists by its name."""
        return {item: team for team, items in self.items.items() for item in items if not item.endswith("*")}

    @functools.cached_property
    def _beginnings(self) -> Mapping[str, str]:
        return {item[:-1]: team for team, items in self.items.items() for item in items if item.endswith("*")}

    @functools.cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(beginning) for beginning in self._beginnings}, reverse=True))


NO_MEMBERS = Members()
