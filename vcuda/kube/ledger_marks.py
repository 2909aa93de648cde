"""Marks the namespaces that have had a ledger, so that a lost ledger is not mistaken for a first one.

A ledger holds the charges of one namespace. While a pod is being stored, the ledger is the only record of the pod's
charge, and a count of the stored pods would miss it. So every ledger is created closed: it admits nothing. It is opened
at once only if the namespace never had a ledger.
"""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.kube import client
from vcuda.ledger.ledger import MARGIN_SECONDS, Reservation

T = TypeVar("T")

OPENER = "opener"

OPENING_SECONDS = 1.0
"""Seconds for which the ledger of a marked namespace may stay closed before it counts as lost. A replica marks the
namespace first, and then opens the ledger."""

_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)


class _Opener(NamedTuple):
    """An attempt of this process to open a ledger.

    ``version``: the resourceVersion of the closed ledger. It was read before the mark was written.
    ``opener``: the random content of the mark, by which this process recognises its own mark.
    """

    version: str
    opener: str


class _Loss(NamedTuple):
    """A closed ledger. ``counter`` identifies it. ``since``: the time when this process first saw it, in seconds of
    ``clock``."""

    counter: int
    since: float


@dataclass(eq=False)
class LedgerMarks:
    """The marks of namespaces. Each mark is a ConfigMap in the namespace of the ledgers.

    A mark is deleted only together with its ledger, when the stored pods show all charges of the ledger. So the loss of
    a ledger is noticed even if the namespace was deleted and created again. ``storable_seconds``: the time after which
    a charged pod can no longer be stored. Ages are measured on this process's own clock.
    """

    kube: client.Kube
    collection: str
    storable_seconds: float
    clock: Callable[[], float] = time.monotonic
    _claims: dict[str, _Opener] = field(default_factory=dict)
    _losses: dict[str, _Loss] = field(default_factory=dict)

    def check_lost(self, namespace: str, lost: Reservation) -> None:
        """Raise LedgerLost while a pod that was charged in the lost ledger may still be stored."""
        missing = self.missing(namespace, lost)
        if (left := lost.seconds + self.storable_seconds + MARGIN_SECONDS - missing) > 0:
            raise errors.LedgerLost(namespace, missing, left)

    def missing(self, namespace: str, lost: Reservation) -> float:
        """Return the seconds since this process first saw the ledger closed."""
        known, now = self._losses.get(namespace), self.clock()
        # Each created ledger has its own counter. So the age of a newer ledger starts at 0.
        if known is None or known.counter != lost.counter:
            known = self._losses[namespace] = _Loss(lost.counter, now)
        return now - known.since

    def claim(self, namespace: str, version: str, lost: Reservation, timeout: float) -> bool:
        """Mark the namespace. Return True if it had no mark before.

        ``version``: the resourceVersion at which the closed ledger was read. Without an earlier mark, no other ledger
        can have admitted a charge. So the caller may replace this version by an open ledger at once. If another replica
        opens the ledger first, the caller's write raises Conflict.
        """
        known = self._claims.get(namespace)
        tried = known is not None and known.version == version
        # A new ledger is open within `OPENING_SECONDS`. So a ledger that is still closed after this time was lost.
        if not tried and self.missing(namespace, lost) >= OPENING_SECONDS:
            return False
        claim = known if known and tried else _Opener(version, secrets.token_urlsafe(12))
        self._claims[namespace] = claim
        try:
            answered(lambda: self.kube.post(self.collection, _mark(namespace, claim.opener), timeout=timeout))
        except errors.Conflict:
            if tried and (mark := self._get(namespace, timeout)) and (mark.data or {}).get(OPENER) == claim.opener:
                return True
            self._claims.pop(namespace, None)
            return False
        return True

    def renew(self, namespace: str, timeout: float) -> None:
        """Replace or create the mark, so that every mark that was read before is outdated. Raises Conflict if another
        process writes the mark at the same time."""
        mark, opener = self._get(namespace, timeout), secrets.token_urlsafe(12)
        if mark is None:
            answered(lambda: self.kube.post(self.collection, _mark(namespace, opener), timeout=timeout))
            return
        body = _mark(namespace, opener, mark.metadata.resource_version)
        try:
            answered(lambda: self.kube.put(self._path(namespace), body, timeout=timeout))
        except errors.NotFound as error:
            raise errors.Conflict(error.status, error.message) from error

    def opened(self, namespace: str) -> None:
        self._claims.pop(namespace, None)
        self._losses.pop(namespace, None)

    def current(self, namespace: str, timeout: float = 10) -> str | None:
        """Return the resourceVersion of a namespace's mark; None if there is no mark."""
        mark = self._get(namespace, timeout)
        return mark.metadata.resource_version if mark else None

    def remove(self, namespace: str, version: str) -> None:
        """Delete the mark if it still has this version. Otherwise raises Conflict or NotFound."""
        self.kube.delete(self._path(namespace), msgspec.json.encode({"preconditions": {"resourceVersion": version}}))

    def _get(self, namespace: str, timeout: float) -> k8s_types.ConfigMap | None:
        try:
            return _CONFIG_MAP.decode(self.kube.get(self._path(namespace), timeout=timeout))
        except errors.NotFound:
            return None

    def _path(self, namespace: str) -> str:
        return f"{self.collection}/{_name(namespace)}"


@dataclass(eq=False)
class SeenVersions:
    """The newest version of each ledger that this process has seen within the last ``seconds``.

    resourceVersions only grow, even if an object is deleted and created again. They decrease only when etcd is restored
    from a backup. An object that was admitted by an older view is stored by now, or never will be.
    """

    seconds: float
    clock: Callable[[], float]
    # By namespace, the version and the time when it was last seen. The oldest entry comes first.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def newest(self, namespace: str) -> int:
        """Return the newest version, or 0. An older version in a later answer means that etcd was restored."""
        version, at = self._seen.get(namespace, (0, -math.inf))
        return version if self.clock() < at + self.seconds else 0

    def note(self, namespace: str, version: str | None, *, anew: bool) -> None:
        """Record a version. With ``anew``, record it even if it is older than the newest known version."""
        known, seen, now = self.newest(namespace), int(version or 0), self.clock()
        self._seen.pop(namespace, None)
        self._seen[namespace] = seen if anew else max(seen, known), now
        oldest = next(iter(self._seen))
        if self._seen[oldest][1] + self.seconds < now:
            del self._seen[oldest]


def answered(write: Callable[[], T]) -> T:
    """Return the answer to a write. Raises WriteUnanswered if the outcome is unknown."""
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
    # The name of a namespace has no dot. So no ledger can have this name.
    return f"gpu-ledger-opened.{namespace}"
