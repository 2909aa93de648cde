"""Adds up the usage of each team over its namespaces, for the usage reports."""

import threading
from collections.abc import Collection, Mapping

import msgspec

from vcuda.ledger.report import TeamUse
from vcuda.quota.model import Team, Usage, all_models

Usages = Mapping[str, Usage]
"""The usage of one namespace, by GPU model."""

CHECK_SECONDS = 0.05
"""The seconds that a check of one namespace may take of the time for all namespaces, on average."""

_KEY = "team:"


def team_key(team: str) -> str:
    """Return the key of a team in a work queue of namespaces. No namespace has this name."""
    return f"{_KEY}{team}"


def team_in(key: str) -> str | None:
    """Return the team that a key of a work queue stands for; None if the key is a namespace."""
    return key.removeprefix(_KEY) if key.startswith(_KEY) else None


class TeamUsages:
    """The last known usage of each namespace that is in a team, and the sum for each team. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._team_of: dict[str, str] = {}
        self._members: dict[str, dict[str, Usages]] = {}
        # The sums are kept, because a team may have thousands of namespaces.
        self._sums: dict[str, dict[str, Usage]] = {}
        self._uses: dict[str, TeamUse] = {}

    def record(self, namespace: str, team: Team | None, usages: Usages) -> TeamUse | None:
        """Record the usage of a namespace. Return the usage of its team; None if it is in no team."""
        with self._lock:
            if (before := self._team_of.pop(namespace, None)) is not None:
                self._leave(namespace, before)
            if team is None:
                return None
            self._team_of[namespace] = team.name
            self._members.setdefault(team.name, {})[namespace] = usages
            sums = self._sums.setdefault(team.name, {})
            sums |= {model: all_models([sums.get(model, Usage()), usage]) for model, usage in usages.items()}
            use = self._uses[team.name] = TeamUse.of(team, sums)
            return use

    def _leave(self, namespace: str, team: str) -> None:
        sums = self._sums[team]
        for model, usage in self._members[team].pop(namespace).items():
            pairs = zip(msgspec.structs.astuple(sums[model]), msgspec.structs.astuple(usage), strict=True)
            sums[model] = Usage(*(one - other for one, other in pairs))
        if not self._members[team]:
            del self._members[team], self._sums[team], self._uses[team]

    def current(self, use: TeamUse) -> TeamUse:
        """Return the newest usage of the same team."""
        return self._uses.get(use.name, use)

    def count(self, team: str) -> int:
        return len(self._members.get(team, ()))

    def interval(self, team: str) -> float:
        """Return the minimum seconds between two checks of all namespaces of a team."""
        return max(1.0, self.count(team) * CHECK_SECONDS)

    def members(self, team: str) -> Collection[str]:
        with self._lock:
            return [*self._members.get(team, ())]
