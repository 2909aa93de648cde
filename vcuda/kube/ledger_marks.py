"""Marks of the namespaces that have a ledger: so one that is lost is told from one that there never was.

A ledger holds for a moment what nothing else does: charges of pods that are being stored just then. To count the pods
and begin anew would forget those. So where a ledger is gone nothing is charged until none of them can be stored any
more.
"""

import time
import uuid
from collections.abc import Callable

import msgspec

from vcuda import errors, k8s_types
from vcuda.kube import client

OPENER = "opener"

_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)


class Opening(msgspec.Struct, frozen=True):
    """What is known before a ledger is created: the namespace's uid, and the version of its mark, where it has one.

    The uid is empty where there is no such namespace.
    """

    uid: str
    mark: str | None = None


class _Loss(msgspec.Struct, frozen=True):
    """A ledger that was missing beside this version of its mark since then, and when that was last looked at."""

    mark: str
    since: float
    looked: float


class LedgerMarks:
    """One ConfigMap beside the ledgers for each namespace that was given one, named by the namespace's uid.

    ``storable_seconds`` after its charge a pod can no longer be stored. For how long a ledger has been lost is measured
    from when this process first saw it missing beside this version of its mark: who makes it anew writes that first.
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
        # By namespaces that exist, and have lost their ledger.
        self._lost: dict[str, _Loss] = {}
        self._written: dict[str, str] = {}

    def opening(self, namespace: str, timeout: float) -> Opening:
        """Return what is known of a namespace that has no ledger.

        Raises LedgerLost where it had one, and pods that were charged in it may still be stored.
        """
        uid = self._uid_of(namespace, timeout)
        mark = self._get(uid, timeout) if uid else None
        if mark is None:
            return Opening(uid)
        version = mark.metadata.resource_version
        # Our own, whose writing got no answer: so no ledger was written after it.
        opener = (mark.data or {}).get(OPENER)
        if opener and opener == self._written.get(namespace):
            return Opening(uid, version)
        missing = self._missing(namespace, version)
        if missing < self._storable_seconds:
            raise errors.LedgerLost(namespace, missing, self._storable_seconds - missing)
        return Opening(uid, version)

    def _missing(self, namespace: str, mark: str) -> float:
        """Return for how long a ledger is known to have been missing."""
        known, now = self._lost.get(namespace), self._clock()
        # Between two looks it may have come under the same mark, if its creation was late or somebody restored it, and
        # been lost again. That is less likely than a caller who comes again only after the time that he was told.
        if known is None or known.mark != mark or now > known.looked + 2 * self._storable_seconds:
            known = _Loss(mark, now, now)
        self._lost[namespace] = _Loss(mark, known.since, now)
        return now - known.since

    def found(self, namespace: str) -> None:
        """Take note that the namespace has its ledger."""
        self._lost.pop(namespace, None)

    def write(self, namespace: str, opening: Opening, timeout: float) -> None:
        """Mark the namespace; the ledger may be created then, once.

        Raises Conflict: somebody else has marked it, and creates the ledger. Unavailable: it may be marked, or not.
        """
        if not opening.uid:
            raise errors.NotFound(404, f"there is no namespace {namespace}")
        opener = uuid.uuid4().hex
        metadata = {
            "name": _name(opening.uid),
            "labels": {"app.kubernetes.io/managed-by": "vcuda-quota"},
            # Kubernetes deletes it after the namespace.
            "ownerReferences": [{"apiVersion": "v1", "kind": "Namespace", "name": namespace, "uid": opening.uid}],
            **({"resourceVersion": opening.mark} if opening.mark else {}),
        }
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {OPENER: opener}}
        self._written[namespace] = opener
        try:
            if opening.mark:
                self._kube.put(self._path(opening.uid), msgspec.json.encode(body), timeout=timeout)
            else:
                self._kube.post(self._collection, msgspec.json.encode(body), timeout=timeout)
        except errors.NotFound as error:
            raise errors.Conflict(error.status, error.message) from error

    def used(self, namespace: str) -> None:
        """Take note that the ledger is being created by the mark that was written last."""
        self._written.pop(namespace, None)

    def current(self, namespace: str, timeout: float = 10) -> Opening:
        """Return the uid of a namespace, and the version of its mark."""
        uid = self._uid_of(namespace, timeout)
        mark = self._get(uid, timeout) if uid else None
        return Opening(uid, mark.metadata.resource_version if mark else None)

    def remove(self, known: Opening) -> None:
        """Take the mark away, if it is still this one; else Conflict, or NotFound."""
        if known.mark:
            precondition = {"preconditions": {"resourceVersion": known.mark}}
            self._kube.delete(self._path(known.uid), msgspec.json.encode(precondition))

    def _uid_of(self, namespace: str, timeout: float) -> str:
        try:
            raw = self._kube.get(f"/api/v1/namespaces/{client.segment(namespace)}", timeout=timeout)
        except errors.NotFound:
            return ""
        return msgspec.json.decode(raw, type=k8s_types.K8sObject).metadata.uid

    def _get(self, uid: str, timeout: float) -> k8s_types.ConfigMap | None:
        try:
            return _CONFIG_MAP.decode(self._kube.get(self._path(uid), timeout=timeout))
        except errors.NotFound:
            return None

    def _path(self, uid: str) -> str:
        return f"{self._collection}/{_name(uid)}"


def _name(uid: str) -> str:
    # No namespace has a dot in its name, so it is no ledger's name.
    return f"gpu-ledger-opened.{uid}"
