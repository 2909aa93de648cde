"""Measures the ages of the charges and reservations in the ledgers, and finds the expired ones.

A ledger stores no times, because the clock of the replica that wrote the ledger may be wrong. The leader measures each
age on its own clock, from when it first saw the charge or reservation. So a new leader waits longer, never shorter.
"""

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from vcuda.errors import UnreadableLedger
from vcuda.kube import NamedLedger
from vcuda.ledger.ledger import MARGIN_SECONDS, RESERVATION_SECONDS, UNSEEN_SECONDS, Ledger
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS, STORABLE_SECONDS

SEEN_SECONDS = 5.0
"""Seconds within which the watches normally deliver an admitted pod."""


class RecountTiming(msgspec.Struct, frozen=True):
    """The durations, in seconds, that control how ledgers are recounted from the stored objects.

    ``storable_seconds``: how long after its admission a pod can still be stored by the API server.
    ``resync_seconds``: the period of the resync, which recounts all namespaces in case an event was missed.
    ``max_terminating_seconds``: the most seconds for which a deleted pod stays charged while its containers may run.
    """

    storable_seconds: float = STORABLE_SECONDS
    resync_seconds: float = 600.0
    max_terminating_seconds: float = MAX_TERMINATING_SECONDS

    @property
    def uncertain(self) -> float:
        """The seconds after which each pod that a replica has admitted is stored, or can no longer be stored."""
        return self.storable_seconds + RESERVATION_SECONDS + MARGIN_SECONDS


class Watch(msgspec.Struct, frozen=True):
    """The period during which the watch of pods and the watch of claims have both run without a gap."""

    pods: str
    claims: str
    began: float

    def is_of(self, other: "Watch | None") -> bool:
        return other is not None and (self.pods, self.claims) == (other.pods, other.claims)


class Sighting(msgspec.Struct, frozen=True):
    """The moment at which this leader first saw a charge in a ledger.

    ``at``: this moment, in seconds.
    ``watch``: the watches (see `Watch`) at this moment, if the charge was surely made after they began; otherwise None.
    """

    at: float
    watch: Watch | None = None


class Overdue(msgspec.Struct, frozen=True):
    """The expired entries of one kind in a ledger: pending charges, terminating charges, or reservations.

    ``keys``: the keys of the expired entries.
    ``next_in``: seconds until the next entry expires; None if every entry has expired.
    """

    keys: Collection[str] = frozenset()
    next_in: float | None = None

    @classmethod
    def of(cls, ends: Mapping[str, float], now: float) -> "Overdue":
        """Return the entries that have expired at ``now``. ``ends``: the time at which each entry expires."""
        waiting = [end - now for end in ends.values() if end > now]
        return cls({key for key, end in ends.items() if end <= now}, min(waiting, default=None))


class ChargeAges:
    """The ages of the charges and reservations in all ledgers.

    A reservation is quota from which one webhook replica admits pods without a write to the ledger. ``now`` is the
    present time in seconds.
    """

    def __init__(self, timing: RecountTiming) -> None:
        self._timing = timing
        self._watch: Watch | None = None
        # Pending and terminating charges are kept apart, because both kinds may have the same key, the uid of a pod.
        self._pending: dict[str, dict[str, Sighting]] = {}
        self._terminating: dict[str, dict[str, Sighting]] = {}
        # `_written_under`: for each namespace, the watch that was current when this leader last wrote the ledger.
        self._written_under: dict[str, Watch] = {}
        # `_renewed`: by namespace and replica, the reservation's counter, and the time of its last change (a renewal).
        self._renewed: dict[str, dict[str, tuple[int, float]]] = {}
        # `_recorded`: by namespace, the version of the ledger whose charges `record_all` has seen last.
        self._recorded: Mapping[str, str] = {}

    def watching(self, pods: str, claims: str, now: float) -> Watch:
        """Return the current watch. ``pods``, ``claims``: the resourceVersions of the lists with which it began."""
        watch = Watch(pods, claims, now)
        if not watch.is_of(self._watch):
            self._watch = watch
        return self._watch or watch

    def written(self, namespace: str, watch: Watch) -> None:
        """Record that this leader wrote a ledger. Charges that it first sees later were made after ``watch`` began."""
        self._written_under[namespace] = watch

    def record_all(self, ledgers: Iterable[NamedLedger], watch: Watch, now: float) -> None:
        """Record when the charges and reservations of all ledgers were first seen."""
        versions = {}
        for known in ledgers:
            namespace, version = known.namespace, known.config_map.metadata.resource_version
            versions[namespace] = version
            if self._recorded.get(namespace) != version:
                with contextlib.suppress(UnreadableLedger):  # A recount reports this error.
                    ledger = known.read().ledger
                    self.pending(namespace, ledger, watch, now)
                    self.terminating(namespace, ledger, now)
                    self.reservations(namespace, ledger, watch, now)
        for namespace in self._recorded.keys() - versions.keys():
            self.forget(namespace)
        self._recorded = versions

    def forget(self, namespace: str) -> None:
        """Forget a namespace whose ledger was deleted."""
        for kept in (self._pending, self._terminating, self._written_under, self._renewed):
            kept.pop(namespace, None)

    def pending(self, namespace: str, ledger: Ledger, watch: Watch, now: float) -> Overdue:
        """Return the expired pending charges. If a new LIST lacks such a pod, it can never be stored."""
        # If this leader has written the ledger since this watch began, it knew all charges of the ledger at that time.
        # So a charge that the leader sees now for the first time was made after the watch began.
        covered = watch if watch.is_of(self._written_under.get(namespace)) else None
        first = self._sightings(self._pending, namespace, ledger.pending, Sighting(now, covered))
        return Overdue.of({uid: first[uid].at + self._timing.storable_seconds for uid in ledger.pending}, now)

    def unstored(self, namespace: str, ledger: Ledger, now: float) -> Overdue:
        """Return the pending charges of pods and claims that the watches should have delivered by now."""
        first = self._pending.get(namespace, {})
        return Overdue.of({uid: first[uid].at + SEEN_SECONDS for uid in ledger.pending if uid in first}, now)

    def seconds_unseen(self, namespace: str, ledger: Ledger, uid: str, watch: Watch, now: float) -> int:
        """Return for how many seconds a pod with a pending charge may still run, although the pod is not stored.

        The pod may have been stored and force-deleted before the watch began. Return 0 if the pod was admitted later.
        """
        seen = self._pending.get(namespace, {}).get(uid)
        if seen and watch.is_of(seen.watch):
            return 0
        # `longest_claim_grace` includes all pending pods, because any pod may be a user of a pending claim.
        longest = max(UNSEEN_SECONDS, ledger.longest_claim_grace)
        return max(math.ceil(watch.began + min(longest, self._timing.max_terminating_seconds) - now), 0)

    def terminating(self, namespace: str, ledger: Ledger, now: float) -> Overdue:
        first = self._sightings(self._terminating, namespace, ledger.terminating, Sighting(now))
        longest = self._timing.max_terminating_seconds
        ends = {key: first[key].at + min(each.seconds, longest) for key, each in ledger.terminating.items()}
        return Overdue.of(ends, now)

    def reservations(self, namespace: str, ledger: Ledger, watch: Watch, now: float) -> Overdue:
        """Return the webhook replicas whose reservations (quota that a replica may use without a write) have expired.

        These replicas have ended. Each pod that they admitted is stored by now, or can no longer be stored.
        """
        known = self._renewed.pop(namespace, {})
        renewed: dict[str, tuple[int, float]] = {}
        for replica, each in ledger.reserved.items():
            counter, since = known.get(replica, (each.counter, now))
            renewed[replica] = (each.counter, since if counter == each.counter else now)
        if renewed:
            self._renewed[namespace] = renewed
        # A pod may have been admitted from a reservation, and deleted by force before this watch began. Its containers
        # may run for the grace period, at most `storable_seconds`. So keep the reservation until this watch has lasted
        # for that time.
        wait = self._timing.storable_seconds + MARGIN_SECONDS
        return Overdue.of(
            {
                replica: max(renewed[replica][1] + each.seconds, watch.began) + wait
                for replica, each in ledger.reserved.items()
            },
            now,
        )

    def reservation_ages(self, now: float) -> Mapping[str, float]:
        """Return for each namespace the longest time since a replica renewed its reservation. Thread-safe."""
        renewed = self._renewed.copy()
        return {namespace: now - min(since for _, since in each.values()) for namespace, each in renewed.items()}

    def _sightings(
        self, remembered: dict[str, dict[str, Sighting]], namespace: str, keys: Iterable[str], now: Sighting
    ) -> Mapping[str, Sighting]:
        """Return and remember when each charge was first seen. A new charge was first seen ``now``."""
        known = remembered.pop(namespace, {})
        # A slow watch may deliver an old ledger without a recent charge. So keep the times of all recent charges.
        recent = now.at - self._timing.resync_seconds
        first = {key: seen for key, seen in known.items() if seen.at > recent}
        first |= {key: known.get(key, now) for key in keys}
        if first:
            remembered[namespace] = first
        return first
