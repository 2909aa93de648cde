"""Marks each namespace that has had a ledger. So a lost ledger is not mistaken for a namespace's first ledger.

A ledger records the charges of one namespace (the GPU quota that its pods take). Until an admitted pod is stored, only
the ledger records the charge of the pod. A count of the stored pods would miss this charge. So every new ledger is
closed, which means that nothing is admitted. It is opened at once only if the namespace has no mark.
"""

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import client
from vcuda.ledger.ledger import MARGIN_SECONDS, Reservation

T = TypeVar("T")

MARK, OPENER = "gpu-ledger-opened.", "opener"
"""The beginning of the name of a mark, and its key."""

OPENING_SECONDS = 1.0
"""A new ledger is closed (admits nothing), and a replica marks the namespace before it opens the ledger. If the ledger
of a marked namespace stays closed for longer than this many seconds, an earlier ledger was lost."""

_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


class _Opener(NamedTuple):
    """An attempt of this process to open a ledger. The process first creates a mark.

    ``version``: the resourceVersion of the closed ledger (which admits no pods yet), read before the mark was created.
    ``opener``: a random text in the mark, by which this process recognises its own mark.
    """

    version: str
    opener: str


class _Loss(NamedTuple):
    """A closed ledger (it admits nothing), which may replace a lost ledger.

    ``counter``: a random number that identifies the closed ledger.
    ``since``: when this process first read the closed ledger, by this process's clock.
    """

    counter: int
    since: float


@dataclass(eq=False)
class LedgerMarks:
    """Reads and writes the marks of namespaces. A mark is a ConfigMap that shows that the namespace has had a ledger.

    A mark is deleted only together with its ledger, and only after every charge of the ledger belongs to a stored
    object. So a lost ledger is noticed even if the namespace was deleted and created again. ``storable_seconds``: a pod
    is stored within this many seconds after its admission, or never. ``clock``: measures ages, in this process only.
    """

    kube: client.Kube
    collection: str
    storable_seconds: float
    clock: Callable[[], float] = time.monotonic
    _claims: dict[str, _Opener] = field(default_factory=dict)
    _losses: dict[str, _Loss] = field(default_factory=dict)

    def check_lost(self, namespace: str, lost: Reservation) -> None:
        """Raise LedgerLost if a pod that was charged in the namespace's lost ledger may still be stored later."""
        missing = self.missing(namespace, lost)
        if (left := lost.seconds + self.storable_seconds + MARGIN_SECONDS - missing) > 0:
            raise errors.LedgerLost(namespace, missing, left)

    def missing(self, namespace: str, lost: Reservation) -> float:
        """Return the seconds since this process first read the namespace's closed ledger, which admits nothing."""
        known, now = self._losses.get(namespace), self.clock()
        # Each closed ledger has a random counter. Another counter means another ledger, whose age is measured from now.
        if known is None or known.counter != lost.counter:
            known = self._losses[namespace] = _Loss(lost.counter, now)
        return now - known.since

    def claim(self, namespace: str, version: str, lost: Reservation, timeout: float) -> bool:
        """Create a namespace's mark. Return True if there was no mark before.

        True means that an earlier ledger never existed, or was deleted when all its charges belonged to stored objects.
        So the caller may open the ledger at once, by a write at ``version``, the resourceVersion at which the caller
        read the closed ledger. If another replica opens the ledger first, this write raises Conflict.
        """
        known = self._claims.get(namespace)
        tried = known is not None and known.version == version
        # A namespace's first ledger opens within `OPENING_SECONDS`. A ledger that is closed longer replaces a lost one.
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
        """Replace or create the mark of a namespace, which records that the namespace has had a ledger.

        A process that has read the older mark cannot delete the new mark. Raises Conflict if another process writes the
        mark at the same time.
        """
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
        """Return the resourceVersion of the ConfigMap that marks a namespace; None if the namespace has no mark."""
        mark = self._get(namespace, timeout)
        return mark.metadata.resource_version if mark else None

    def remove(self, namespace: str, version: str) -> None:
        """Delete the ConfigMap that marks a namespace, if it has ``version``. Otherwise raises Conflict or NotFound."""
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
    """Remembers the newest resourceVersion of each ledger, for ``seconds`` after this process last read the ledger.

    If a later read returns a lower version, etcd was restored from a backup. Otherwise resourceVersions only grow, even
    if an object is deleted and created again. After ``seconds``, each pod that the ledger admitted is stored, or can no
    longer be stored.
    """

    seconds: float
    clock: Callable[[], float]
    # `_seen` maps a namespace to its ledger's version and the time of the last read. The first entry is the oldest.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def newest(self, namespace: str) -> int:
        """Return the newest version of a ledger that this process has read recently; 0 if there is none."""
        version, at = self._seen.get(namespace, (0, -math.inf))
        return version if self.clock() < at + self.seconds else 0

    def record(self, namespace: str, version: str | None, *, anew: bool) -> None:
        """Record the version of a ledger that was read or written. ``anew``: True to replace a newer version too."""
        known, seen, now = self.newest(namespace), int(version or 0), self.clock()
        self._seen.pop(namespace, None)
        self._seen[namespace] = seen if anew else max(seen, known), now
        oldest = next(iter(self._seen))
        if self._seen[oldest][1] + self.seconds < now:
            del self._seen[oldest]


def answered(write: Callable[[], T]) -> T:
    """Call ``write`` and return its result. Raises WriteUnanswered if it is unknown whether the write was stored."""
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
    # A ledger and a mark never have the same name: a ledger's name has no dot.
    return f"{MARK}{namespace}"
