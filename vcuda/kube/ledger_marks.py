"""Marks of the namespaces that have a ledger: so one that is lost is told from one that there never was.

A ledger holds for a moment what nothing else does: charges of pods that are being stored just then. To count the pods
and begin anew would forget those. So every ledger is made closed, and is opened at once only where there never was one.
"""

import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.kube import client
from vcuda.ledger.ledger import MARGIN_SECONDS, Reservation

T = TypeVar("T")

OPENER = "opener"

OPENING_SECONDS = 1.0
"""For how long a ledger that is marked and closed may be on its way: another marks it first, then opens it."""

_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)


class _Opener(NamedTuple):
    """What tells our mark from others', and the version of the closed ledger that was read before it was written."""

    version: str
    opener: str


class _Loss(NamedTuple):
    """What reserves everything in a ledger, and since when that is known here."""

    counter: int
    since: float


class LedgerMarks:
    """One ConfigMap beside the ledgers for each namespace that was given one, named by the namespace.

    It goes with the ledger, when nothing is charged there that is not stored, and with nothing else: so also where a
    namespace was deleted and made again, and its ledger was lost meanwhile, that is known. ``storable_seconds`` after
    its charge a pod can no longer be stored. Ages are measured on this process's own clock.
    """

    def __init__(
        self,
        kube: client.Kube,
        collection: str,
        storable_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._collection = collection
        self._storable_seconds = storable_seconds
        self._clock = clock
        self._claims: dict[str, _Opener] = {}
        self._losses: dict[str, _Loss] = {}

    def check_lost(self, namespace: str, lost: Reservation) -> None:
        """Raise LedgerLost until no pod can be stored any more that was charged in the ledger before this one."""
        missing = self.missing(namespace, lost)
        if (left := lost.seconds + self._storable_seconds + MARGIN_SECONDS - missing) > 0:
            raise errors.LedgerLost(namespace, missing, left)

    def missing(self, namespace: str, lost: Reservation) -> float:
        """Return for how many seconds this ledger is known to have been closed."""
        known, now = self._losses.get(namespace), self._clock()
        # Each ledger that is made has a counter of its own: of one that was made since then nothing is known.
        if known is None or known.counter != lost.counter:
            known = self._losses[namespace] = _Loss(lost.counter, now)
        return now - known.since

    def claim(self, namespace: str, version: str, lost: Reservation, timeout: float) -> bool:
        """Mark the namespace, whose closed ledger was read at this version; return whether nobody had done so before.

        Then that version may be replaced by an open ledger at once: as there was no mark there was no other ledger from
        which anybody could have had a yes, and if another opens this one, that version is gone.
        """
        known = self._claims.get(namespace)
        tried = known is not None and known.version == version
        # By then one that was marked as it was made is open; what stays closed was lost.
        if not tried and self.missing(namespace, lost) >= OPENING_SECONDS:
            return False
        claim = known if known and tried else _Opener(version, secrets.token_urlsafe(12))
        self._claims[namespace] = claim
        try:
            answered(lambda: self._kube.post(self._collection, _mark(namespace, claim.opener), timeout=timeout))
        except errors.Conflict:
            if tried and (mark := self._get(namespace, timeout)) and (mark.data or {}).get(OPENER) == claim.opener:
                return True
            self._claims.pop(namespace, None)
            return False
        return True

    def renew(self, namespace: str, timeout: float) -> None:
        """Mark the namespace, whether it is or not, so that no other mark that was seen is the one that there is.

        Raises Conflict: somebody else did so first.
        """
        mark, opener = self._get(namespace, timeout), secrets.token_urlsafe(12)
        if mark is None:
            answered(lambda: self._kube.post(self._collection, _mark(namespace, opener), timeout=timeout))
            return
        body = _mark(namespace, opener, mark.metadata.resource_version)
        try:
            answered(lambda: self._kube.put(self._path(namespace), body, timeout=timeout))
        except errors.NotFound as error:
            raise errors.Conflict(error.status, error.message) from error

    def opened(self, namespace: str) -> None:
        """Take note that the namespace has a ledger in which everybody may charge."""
        self._claims.pop(namespace, None)
        self._losses.pop(namespace, None)

    def current(self, namespace: str, timeout: float = 10) -> str | None:
        """Return the version of a namespace's mark, None where it has none."""
        mark = self._get(namespace, timeout)
        return mark.metadata.resource_version if mark else None

    def remove(self, namespace: str, version: str) -> None:
        """Take the mark away, if it is still this one; else Conflict, or NotFound."""
        self._kube.delete(self._path(namespace), msgspec.json.encode({"preconditions": {"resourceVersion": version}}))

    def _get(self, namespace: str, timeout: float) -> k8s_types.ConfigMap | None:
        try:
            return _CONFIG_MAP.decode(self._kube.get(self._path(namespace), timeout=timeout))
        except errors.NotFound:
            return None

    def _path(self, namespace: str) -> str:
        return f"{self._collection}/{_name(namespace)}"


class SeenVersions:
    """The newest version of each ledger that was seen within so many ``seconds``.

    resourceVersions only grow, also where an object is deleted and made again, until etcd is restored from a backup.
    What was granted by what was seen before that time is stored by now, or never will be.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        # With the time when each was seen last, the oldest first.
        self._seen: dict[str, tuple[int, float]] = {}

    def newest(self, namespace: str) -> int:
        """Return the newest version that is known; a call that begins after this brings no older one."""
        version, at = self._seen.get(namespace, (0, -math.inf))
        return version if self._clock() < at + self._seconds else 0

    def note(self, namespace: str, version: str | None, *, anew: bool) -> None:
        """Take note of a version; ``anew``: also where it is older than what is known."""
        known, seen, now = self.newest(namespace), int(version or 0), self._clock()
        self._seen.pop(namespace, None)
        self._seen[namespace] = seen if anew else max(seen, known), now
        oldest = next(iter(self._seen))
        if self._seen[oldest][1] + self._seconds < now:
            del self._seen[oldest]


def answered(write: Callable[[], T]) -> T:
    """Return the answer to a write. Raises WriteUnanswered where there is none."""
    try:
        return write()
    except errors.Unavailable as error:
        raise errors.WriteUnanswered(str(error)) from error


def _mark(namespace: str, opener: str, replaced: str | None = None) -> bytes:
    metadata = {
        "name": _name(namespace),
        "labels": {"app.kubernetes.io/managed-by": "vcuda-quota"},
        **({"resourceVersion": replaced} if replaced else {}),
    }
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {OPENER: opener}}
    return msgspec.json.encode(body)


def _name(namespace: str) -> str:
    # No namespace has a dot in its name, so it is no ledger's name.
    return f"gpu-ledger-opened.{namespace}"
