"""Stores the ledgers in the cluster. A ledger records the GPU quota that one namespace uses.

Each ledger is one ConfigMap, which is written by compare-and-swap. All ledgers are in one namespace, where tenants have
no rights. An RBAC rule cannot list the ledgers by name, because each new namespace may get a ledger. So this system has
rights to every ConfigMap of that namespace, and nothing else may be stored there.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.allocations.stored_claims import ClaimPrice
from vcuda.k8s_types import Decoder
from vcuda.kube import client, watch
from vcuda.kube.counts import NamespaceCounter
from vcuda.kube.ledger_marks import OPENING_SECONDS, LedgerMarks, SeenVersions, answered
from vcuda.kube.reflector import Reflector
from vcuda.ledger.ledger import LOST, MARGIN_SECONDS, RESERVATION_SECONDS, Ledger, Reservation
from vcuda.ledger.recount import Expired, recount
from vcuda.ledger.text import OtherFormat, read_ledger, write_ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.well_known import STORABLE_SECONDS
from vcuda.requests.resources import BUILT_IN, GpuResources

T = TypeVar("T")

KEY = "ledger"
NAMESPACE_LABEL = "quota.vcuda.io/ledger-of"

FINALIZER = "quota.vcuda.io/ledger"
"""If a user deletes a ledger, this finalizer keeps it until each charge of the ledger belongs to a stored pod."""

TEAM_PREFIX = "team.quota.vcuda.io/"
"""The beginning of a label of a ledger. The rest is the name of a team from which the ledger has an allotment."""

LOOK_AGAIN_SECONDS = 0.05

_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


class Stored(msgspec.Struct, frozen=True):
    """A ledger as it was read or written.

    ``version``: the resourceVersion of its ConfigMap; None if no open ledger is stored.
    ``size``: the size of the ConfigMap in bytes.
    ``opens``: True if the stored ledger is closed (admits nothing), and a write of this ledger at ``version`` opens it.
    ``deleting``: True if a user has deleted the ConfigMap, but its finalizer still keeps it.
    ``answered``: when the API server answered the write, in Unix seconds by its clock; minus infinity if unknown.
    """

    ledger: Ledger
    version: str | None
    size: int = 0
    opens: bool = False
    deleting: bool = False
    answered: float = -math.inf


class NamedLedger(msgspec.Struct, frozen=True):
    """One version of a ledger, from a watch. Only `read` decodes it, because most versions are never read."""

    namespace: str
    config_map: k8s_types.ConfigMap

    @property
    def deleting(self) -> bool:
        """True if a user has deleted the ledger's ConfigMap, but its finalizer still keeps the ConfigMap."""
        return self.config_map.metadata.deletion_timestamp is not None

    def read(self) -> Stored:
        """Return the decoded ledger. Raises UnreadableLedger if the ledger's text is damaged."""
        return decode_stored(self.config_map)

    @property
    def counted(self) -> str:
        """The first part of the ledger's text: the charges of the stored pods, and the resourceVersion of the count."""
        return _counted_in((self.config_map.data or {}).get(KEY, ""))

    @property
    def pending_bytes(self) -> int:
        """The size of the rest of the ledger's text, which grows with the pending, terminating and reserved charges."""
        return len((self.config_map.data or {}).get(KEY, "")) - len(self.counted)


# An update with ``NOT_TRACKED`` as ``managedFields`` removes this field (Server-Side Apply, "Clearing managedFields").
# Without the field, the API server does a quarter less work for a write. Ledgers are not written by Server-Side Apply.
NOT_TRACKED: Sequence[Mapping[str, str]] = ({},)


class LedgerStore(NamespaceCounter):
    """Reads and writes ledgers. A write raises Conflict if the stored ledger has changed since it was read.

    ``nodes`` returns the nodes. A pod that is not pinned to a GPU model is charged for the GPU model of its node.
    ``resources`` returns the GPU resources that pods can request.
    ``claim_price`` returns the function that computes a claim's charge; None before the devices have been read.
    ``storable_seconds``: a pod is stored within this many seconds after its admission, or never.
    """

    def __init__(
        self,
        kube: client.Kube,
        namespace: str,
        nodes: Callable[[], Nodes],
        resources: Callable[[], GpuResources] = lambda: BUILT_IN,
        *,
        claim_price: Callable[[], ClaimPrice | None] = lambda: None,
        storable_seconds: float = STORABLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(kube, nodes, resources, claim_price)
        self.namespace = namespace
        self.clock = clock
        self._sleep = sleep
        # `_written` maps a namespace to `NamedLedger.counted` of the last ledger that this process wrote. If the watch
        # delivers a ledger with this text, no other process has counted the stored pods since.
        self._written: dict[str, str] = {}
        self._keeps_written = False
        # `_dropped` maps a namespace to the version of its mark. This process has
        # deleted the ledger, and must still delete the mark.
        self._dropped: dict[str, str] = {}
        self.collection = f"/api/v1/namespaces/{client.segment(namespace)}/configmaps"
        self._marks = LedgerMarks(kube, self.collection, storable_seconds, clock)
        self.check_lost = self._marks.check_lost
        # A ledger's version is kept until each object that the ledger admitted is stored, or can no longer be stored.
        self.uncertain_seconds = storable_seconds + RESERVATION_SECONDS + MARGIN_SECONDS
        self._versions = SeenVersions(self.uncertain_seconds, clock)

    def read(self, namespace: str, timeout: float = 10) -> Stored:
        """Return a namespace's open ledger, for reading only. If there is none, return a ledger counted from a LIST.

        ``timeout``: seconds for each call. Raises UnreadableLedger if the ledger is damaged. Raises LedgerLost while
        pods that were charged in a lost ledger may still be stored later.
        """
        while True:
            stored = self._stored(namespace, timeout)
            if stored is None and self._marks.current(namespace, timeout) is None:
                return Stored(self._counted(namespace, Ledger(), timeout), None)
            if stored := stored or self._created(namespace, timeout):
                if stored.ledger.lost is None:
                    return stored
                if not self._awaits_opening(namespace, stored.ledger.lost):
                    return Stored(self._counted(namespace, stored.ledger, timeout), None)

    def open(self, namespace: str, timeout: float = 10, *, waits: bool = True) -> Stored:
        """Return a namespace's stored ledger, for writing. If there is none, create a closed ledger (it admits
        nothing). For a closed ledger, count the pods, and return an open one, which the caller must write.

        ``waits``: False to raise LedgerLost immediately although another replica may be about to open the ledger.

        Raises the errors of `read`, Conflict if another writer was first, and WriteUnanswered if the outcome of a write
        is unknown. After an error the caller may call `open` again.
        """
        while True:
            stored = self._stored(namespace, timeout) or self._created(namespace, timeout)
            if stored is None:
                continue  # `_created` returns None if another replica has just created the ledger
            if (lost := stored.ledger.lost) is None:
                return stored
            version = str(stored.version)
            # If there was no mark, no charge was lost. So the ledger is opened now.
            if not self._marks.claim(namespace, version, lost, timeout):
                if self._awaits_opening(namespace, lost, waits=waits):
                    continue
                # The mark records that the namespace has had a ledger. Renew the mark, so that a replica that has read
                # an older version of it cannot delete it.
                self._marks.renew(namespace, timeout)
            return msgspec.structs.replace(stored, ledger=self._counted(namespace, stored.ledger, timeout), opens=True)

    def stored(self, namespace: str, timeout: float = 10) -> Stored | None:
        """Return a namespace's stored ledger, which may be closed; None if there is none."""
        return self._stored(namespace, timeout)

    def is_marked(self, namespace: str) -> bool:
        """Return whether the namespace has had a ledger that was not deleted by `drop`."""
        return self._marks.current(namespace) is not None

    def _awaits_opening(self, namespace: str, lost: Reservation, *, waits: bool = True) -> bool:
        """Return False if this replica may open the closed ledger. If another replica may be about to open it, sleep
        briefly and return True.

        Raises LedgerLost if pods that were charged in a lost ledger may still be stored later.
        """
        try:
            self.check_lost(namespace, lost)
        except errors.LedgerLost as error:
            if error.missing >= OPENING_SECONDS or not waits:
                raise
            self._sleep(LOOK_AGAIN_SECONDS)
            return True
        return False

    def _counted(self, namespace: str, ledger: Ledger, timeout: float) -> Ledger:
        """List a namespace's pods, and return ``ledger`` as an open ledger with the charges in this LIST."""
        observed = self.count_pods(namespace, timeout)
        counted = recount(ledger, observed, Expired(replicas={LOST}), counted_since=observed.resource_version)
        if counted.lost:
            raise errors.Unavailable("the ledger was counted by a newer quota ConfigMap than this replica has read")
        return counted

    def _stored(self, namespace: str, timeout: float) -> Stored | None:
        newest = self._versions.newest(namespace)
        try:
            raw = self.kube.get(self.path(namespace), timeout=timeout)
        except errors.NotFound:
            return None
        stored = decode_stored(_CONFIG_MAP.decode(raw), len(raw))
        if int(stored.version or 0) < newest:
            return self._closed(namespace, stored, timeout)
        self._record(namespace, stored)
        return stored

    def _created(self, namespace: str, timeout: float) -> Stored | None:
        """Create and return a closed ledger. Return None if the namespace has a ledger already."""
        newest, ledger = self._versions.newest(namespace), Ledger(reserved={LOST: _everything()})
        body = self._encode(namespace, ledger, None)
        try:
            stored = _written(ledger, lambda: self.kube.post_heard(self.collection, body, timeout=timeout))
        except errors.Conflict:
            return None
        if int(stored.version or 0) < newest:
            # A version lower than one that was seen before means that etcd was restored from a backup. So a ledger and
            # its mark may have been lost.
            self._marks.renew(namespace, timeout)
        self._record(namespace, stored, anew=True)
        return stored

    def _closed(self, namespace: str, stored: Stored, timeout: float) -> Stored | None:
        """Close a ledger, so that it admits nothing.

        The ledger is outdated, because etcd was restored from a backup: this process has read a newer version before.
        Pods that were charged in the newer version may still be stored later.
        """
        self._marks.renew(namespace, timeout)
        ledger = msgspec.structs.replace(stored.ledger, reserved={**stored.ledger.reserved, LOST: _everything()})
        body = self._encode(namespace, ledger, stored.version)
        try:
            closed = _written(ledger, lambda: self.kube.put_heard(self.path(namespace), body, timeout=timeout))
        except (errors.Conflict, errors.NotFound):
            return None
        self._record(namespace, closed, anew=True)
        return closed

    def _record(self, namespace: str, stored: Stored, *, anew: bool = False) -> None:
        self._versions.record(namespace, stored.version, anew=anew)
        if stored.ledger.lost is None:
            self._marks.opened(namespace)

    def write(self, namespace: str, ledger: Ledger, replaced: Stored, timeout: float = 10) -> Stored:
        """Write ``ledger`` in place of ``replaced``, the result of an earlier `open` or `write`. Raises Conflict if
        another writer was first, and WriteUnanswered if it is unknown whether the write was stored."""
        if replaced.version is None:
            raise ValueError(namespace)  # a programming error: a ledger without a version must be opened before a write
        body = self._encode(namespace, ledger, replaced.version)
        try:
            stored = _written(ledger, lambda: self.kube.put_heard(self.path(namespace), body, timeout=timeout))
        except errors.NotFound as error:
            # The ledger was deleted. To the caller this is a change by another writer, so raise Conflict.
            raise errors.Conflict(error.status, error.message) from error
        self._record(namespace, stored)
        return stored

    def drop(self, namespace: str, version: str) -> None:
        """Delete a ledger and its mark, if the ledger still has ``version``. Otherwise raises Conflict or NotFound.

        The caller must ensure that all charges of the ledger belong to stored pods. The next ledger of the namespace is
        opened at once, and then counts only stored pods.
        """
        # Read the mark, a ConfigMap that records that the namespace has had a ledger, before the ledger is deleted. The
        # mark of a later ledger has another version, and must stay.
        mark = self._marks.current(namespace)
        patch = {"metadata": {"resourceVersion": version, "finalizers": None}}
        raw = self.kube.patch(self.path(namespace), msgspec.json.encode(patch), client.MERGE_PATCH)
        left = _CONFIG_MAP.decode(raw).metadata
        # If a user had requested the ConfigMap's deletion, it disappeared when the patch removed its finalizer.
        if left.deletion_timestamp is None:
            preconditions = {"resourceVersion": left.resource_version}
            with contextlib.suppress(errors.NotFound):
                self.kube.delete(self.path(namespace), msgspec.json.encode({"preconditions": preconditions}))
        self._written.pop(namespace, None)
        if mark:
            self._dropped[namespace] = mark
        self.finish_drop(namespace)

    def finish_drop(self, namespace: str) -> None:
        """Delete the mark, which records that a namespace has had a ledger, if this process has deleted the ledger."""
        if mark := self._dropped.get(namespace):
            # If the mark of the namespace (a record that it has had a ledger) now has another version, it belongs to a
            # newer ledger and stays.
            with contextlib.suppress(errors.Conflict, errors.NotFound):
                self._marks.remove(namespace, mark)
            del self._dropped[namespace]

    def reflector(
        self, on_change: Callable[[str], None], on_charge: Callable[[str, int], None]
    ) -> Reflector[NamedLedger]:
        """Return a reflector of all ledgers. ``on_change`` is called with the namespace after a ledger changed.

        If this process wrote the ledger, or if the charges of the stored pods did not change, ``on_charge`` is called
        instead. The caller may react later to such a change. The arguments of ``on_charge`` are the namespace and
        `NamedLedger.pending_bytes`.
        """

        def on_event(old: NamedLedger | None, new: NamedLedger | None) -> None:
            # `on_event` runs after every write of every replica. So for speed it compares ledgers as texts, undecoded.
            known = old and new and new.counted in (old.counted, self._written.get(new.namespace))
            if new and known and not new.deleting and new.pending_bytes:
                on_charge(new.namespace, new.pending_bytes)
            elif changed := new or old:
                on_change(changed.namespace)

        self._keeps_written = True
        selector = {"labelSelector": NAMESPACE_LABEL}
        return Reflector(self.kube, self.collection, self._decode_named, params=selector, on_event=on_event)

    def key(self, namespace: str) -> watch.Key:
        return watch.Key(self.namespace, ledger_name(namespace))

    def _decode_named(self, raw: bytes) -> NamedLedger:
        config_map = _CONFIG_MAP.decode(raw)
        return NamedLedger((config_map.metadata.labels or {})[NAMESPACE_LABEL], config_map)

    def _encode(self, namespace: str, ledger: Ledger, version: str | None) -> bytes:
        metadata = {
            "name": ledger_name(namespace),
            "namespace": self.namespace,
            "labels": {
                "app.kubernetes.io/managed-by": "vcuda-quota",
                NAMESPACE_LABEL: namespace,
                **{f"{TEAM_PREFIX}{team}": "" for team in ledger.allotments},
            },
            "finalizers": [FINALIZER],
            "managedFields": NOT_TRACKED,
            **({"resourceVersion": version} if version is not None else {}),
        }
        data = {KEY: write_ledger(ledger)}
        if self._keeps_written:
            self._written[namespace] = _counted_in(data[KEY])
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def path(self, namespace: str) -> str:
        return f"{self.collection}/{client.segment(ledger_name(namespace))}"


def ledger_name(namespace: str) -> str:
    return f"gpu-ledger-{namespace}"


def _written(ledger: Ledger, write: Callable[[], client.Heard]) -> Stored:
    heard = answered(write)
    metadata = _CONFIG_MAP.decode(heard.body).metadata
    at, deleting = heard.date.timestamp() if heard.date else -math.inf, metadata.deletion_timestamp is not None
    return Stored(ledger, metadata.resource_version, len(heard.body), deleting=deleting, answered=at)


def _everything() -> Reservation:
    # The random counter identifies this closed ledger, so that no process confuses its age with the age of another
    # ledger.
    return Reservation({}, secrets.randbits(53))


def _counted_in(text: str) -> str:
    return text.partition(',"pending":')[0]


def decode_stored(config_map: k8s_types.ConfigMap, size: int = 0) -> Stored:
    ledger, metadata = decode_text(config_map, read_ledger), config_map.metadata
    return Stored(ledger, metadata.resource_version, size, deleting=metadata.deletion_timestamp is not None)


def decode_text(config_map: k8s_types.ConfigMap, decode: Callable[[str], T]) -> T:
    """Return the ledger in a ConfigMap. Raises UnreadableLedger if ``decode`` raises an error."""
    try:
        return decode((config_map.data or {})[KEY])
    except (KeyError, ValueError, RecursionError) as error:
        name = f"{config_map.metadata.namespace}/{config_map.metadata.name}"
        # A ledger in the format of another release must not be deleted, because that release can read its charges.
        update = "Update all components of vcuda quota to one release"
        advice = update if isinstance(error, OtherFormat) else "Delete this ConfigMap, and the ledger is rebuilt"
        raise errors.UnreadableLedger(f"ledger {name} cannot be read: {error}. {advice}") from error
