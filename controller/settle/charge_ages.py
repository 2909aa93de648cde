"""The ages of the charges and reservations in the ledgers, and which of them have expired.

A ledger stores no times, because the clock of the replica that wrote it may be wrong. The leader measures each age on
its own clock, from when it first saw the entry. A new leader therefore waits longer, never shorter.
"""

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from vcuda.ledger.ledger import LEASE_SECONDS, MARGIN_SECONDS, UNSEEN_SECONDS, Ledger
from vcuda.quota.terms import STORABLE_SECONDS


class SettleTiming(msgspec.Struct, frozen=True):
    """Times in seconds.

    ``pending_ttl``: the time after which an admitted pod can no longer be stored.
    ``full_resync``: the period of the resync of all namespaces, which finds changes that events have missed.
    ``max_terminating``: the longest time for which a pod stays charged after it was deleted without having ended.
    """

    pending_ttl: float = STORABLE_SECONDS
    full_resync: float = 600.0
    max_terminating: float = 600.0

    @property
    def uncertain(self) -> float:
        """The seconds after which every pod that a replica admitted is stored, or never will be."""
        return self.pending_ttl + LEASE_SECONDS + MARGIN_SECONDS


class Watch(msgspec.Struct, frozen=True):
    """The watches of pods and claims since the last gap in either.

    ``pods``, ``claims``: the versions of the lists with which the watches began.
    ``began``: when this leader first saw these versions, in seconds.
    """

    pods: str
    claims: str
    began: float

    def is_of(self, other: "Watch | None") -> bool:
        """Return whether this watch and ``other`` began with the same lists."""
        return other is not None and (self.pods, self.claims) == (other.pods, other.claims)


class Sighting(msgspec.Struct, frozen=True):
    """The first sighting of a charge.

    ``at``: in seconds.
    ``watch``: the watch that covers the charge's whole life; None if the charge may be older than the watch.
    """

    at: float
    watch: Watch | None = None


class Overdue(msgspec.Struct, frozen=True):
    """The expired entries of a ledger.

    ``keys``: pending uids, terminating keys, or replicas.
    ``next_in``: seconds until the next entry expires; None if no other entry is left.
    """

    keys: Collection[str] = frozenset()
    next_in: float | None = None

    @classmethod
    def of(cls, ends: Mapping[str, float], now: float) -> "Overdue":
        """Return the entries that have expired at ``now``; ``ends`` has the end of each entry."""
        waiting = [end - now for end in ends.values() if end > now]
        return cls({key for key, end in ends.items() if end <= now}, min(waiting, default=None))


class ChargeAges:
    """The ages of the charges and reservations in all ledgers; every method takes the time, in seconds."""

    def __init__(self, timing: SettleTiming) -> None:
        self._timing = timing
        self._watch: Watch | None = None
        # By namespace. A pod may have a pending and later a terminating charge, both under its uid.
        self._pending: dict[str, dict[str, Sighting]] = {}
        self._terminating: dict[str, dict[str, Sighting]] = {}
        # By namespace, the watch under which this leader last wrote the ledger.
        self._written_under: dict[str, Watch] = {}
        # By namespace and replica, the counter of the reservation, and the time of its last change.
        self._renewed: dict[str, dict[str, tuple[int, float]]] = {}

    def watching(self, pods: str, claims: str, now: float) -> Watch:
        """Return the current watch, given the versions of the lists with which the watches began."""
        watch = Watch(pods, claims, now)
        if not watch.is_of(self._watch):
            self._watch = watch
        return self._watch or watch

    def written(self, namespace: str, watch: Watch) -> None:
        """Note that the ledger was written: every charge that appears later was made under this watch."""
        self._written_under[namespace] = watch

    def pending(self, namespace: str, ledger: Ledger, watch: Watch, now: float) -> Overdue:
        """Return the pending uids whose pod can no longer be stored. A LIST from now on shows every stored one."""
        # This leader has seen every charge in the ledger that it wrote. A charge that is new here is younger.
        covered = watch if watch.is_of(self._written_under.get(namespace)) else None
        first = self._sightings(self._pending, namespace, ledger.pending, Sighting(now, covered))
        return Overdue.of({uid: first[uid].at + self._timing.pending_ttl for uid in ledger.pending}, now)

    def seconds_unseen(self, namespace: str, ledger: Ledger, uid: str, watch: Watch, now: float) -> int:
        """Return for how many seconds the containers of a pending pod that is not stored may still run.

        The pod may have been stored, and force-deleted, before the watch began. 0 if the watch covers its whole life.
        """
        seen = self._pending.get(namespace, {}).get(uid)
        if seen and watch.is_of(seen.watch):
            return 0
        longest = max(UNSEEN_SECONDS, ledger.longest_grace(ledger.pending[uid]))
        return max(math.ceil(watch.began + min(longest, self._timing.max_terminating) - now), 0)

    def terminating(self, namespace: str, ledger: Ledger, now: float) -> Overdue:
        first = self._sightings(self._terminating, namespace, ledger.terminating, Sighting(now))
        longest = self._timing.max_terminating
        ends = {key: first[key].at + min(each.seconds, longest) for key, each in ledger.terminating.items()}
        return Overdue.of(ends, now)

    def reservations(self, namespace: str, ledger: Ledger, watch: Watch, now: float) -> Overdue:
        """Return the replicas whose reservations have expired.

        Such a replica no longer writes, and every pod that it admitted is stored or never will be.
        """
        known = self._renewed.pop(namespace, {})
        renewed: dict[str, tuple[int, float]] = {}
        for replica, each in ledger.reserved.items():
            counter, since = known.get(replica, (each.counter, now))
            renewed[replica] = (each.counter, since if counter == each.counter else now)
        if renewed:
            self._renewed[namespace] = renewed
        # A pod that was admitted from a reservation, and force-deleted before this watch began, may still run. Its
        # grace period is at most `pending_ttl`, so it has ended once the watch is that old.
        wait = self._timing.pending_ttl + MARGIN_SECONDS
        return Overdue.of(
            {
                replica: max(renewed[replica][1] + each.seconds, watch.began) + wait
                for replica, each in ledger.reserved.items()
            },
            now,
        )

    def reservation_ages(self, now: float) -> Mapping[str, float]:
        """Return the seconds since the oldest reservation of each namespace was renewed. Thread-safe."""
        renewed = self._renewed.copy()
        return {namespace: now - min(since for _, since in each.values()) for namespace, each in renewed.items()}

    def _sightings(
        self, remembered: dict[str, dict[str, Sighting]], namespace: str, keys: Iterable[str], now: Sighting
    ) -> Mapping[str, Sighting]:
        """Return when each charge was first seen, and remember it; new charges get ``now``."""
        known = remembered.pop(namespace, {})
        # A ledger from a slow watch may lack a charge for a moment, so recent sightings are kept.
        recent = now.at - self._timing.full_resync
        first = {key: seen for key, seen in known.items() if seen.at > recent}
        first |= {key: known.get(key, now) for key in keys}
        if first:
            remembered[namespace] = first
        return first
