"""Quota documents with teams, pods, and a store with compare-and-swap, for `tests.team_machine`."""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import hypothesis.strategies as st

from vcuda.quota.model import Charge, Limit, NamespaceQuota, Team

NAMESPACES = ("dev", "train", "lab")
TEAMS = ("vision", "speech")
MODELS = ("A100", "T4")
CARD = Charge(100, 0, 100)
CHARGES = (CARD, Charge(50, 8192), Charge(200, 0, 200))
LIMITS = (Limit(200), Limit(300, 65536), Limit(400))


class Conflict(Exception):
    """Another procedure has written the object since this one read it."""


class Document(NamedTuple):
    """One version of the quota document: for each namespace its team, and for each team its limits and its total."""

    places: Mapping[str, str]
    limits: Mapping[str, Mapping[str, Limit]]
    totals: Mapping[str, Limit | None]
    own: Limit

    def quota(self, namespace: str) -> NamespaceQuota:
        own = dict.fromkeys(MODELS, self.own)
        return NamespaceQuota(own, team=self.team(self.places[namespace]) if self.places[namespace] else None)

    def team(self, name: str) -> Team:
        return Team(name, self.limits[name], self.totals[name])


def documents() -> st.SearchStrategy[Document]:
    limit = st.sampled_from(LIMITS)
    places = st.fixed_dictionaries({each: st.sampled_from(("vision", "vision", "speech", "")) for each in NAMESPACES})
    limits = st.fixed_dictionaries({each: st.fixed_dictionaries(dict.fromkeys(MODELS, limit)) for each in TEAMS})
    totals = st.fixed_dictionaries({each: st.sampled_from((None, Limit(300))) for each in TEAMS})
    return st.builds(Document, places, limits, totals, limit)


class Pod(NamedTuple):
    """One pod that is stored, or that the API server may still store.

    ``team``: the team that must count the pod; empty if there is none, or if the pod came with a namespace that joined
    and is not covered yet. ``admitted``: False if the pod runs without an admission.
    """

    namespace: str
    model: str
    charge: Charge
    team: str = ""
    admitted: bool = True


class Store:
    """Objects with versions, which are written by compare-and-swap."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[int, Any]] = {}
        self._versions = itertools.count(1)

    def read(self, key: str) -> tuple[int, Any]:
        """Return the version and the object; 0 and None if it is missing."""
        return self._objects.get(key, (0, None))

    def write(self, key: str, new: Any, version: int) -> int:
        """Replace exactly ``version``, and return the new one. A write that changes nothing keeps the version."""
        stored, old = self.read(key)
        if stored != version:
            raise Conflict
        if old != new:
            self._objects[key] = next(self._versions), new
        return self.read(key)[0]

    def delete(self, key: str) -> None:
        self._objects.pop(key, None)
