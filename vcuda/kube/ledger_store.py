"""Stores the ledgers in the cluster. A ledger is one ConfigMap per limited namespace, written by compare-and-swap.

All ledgers are in one namespace, where tenants have no rights. RBAC cannot name the ledgers, because each new namespace
may get one. So this system has a right to all ConfigMaps of that namespace, which are only ledgers.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from vcuda import errors, k8s_types
from vcuda.allocations.stored_claims import ClaimPrice
from vcuda.kube import client, watch
from vcuda.kube.counts import NamespaceCounter
from vcuda.kube.ledger_marks import OPENING_SECONDS, LedgerMarks, SeenVersions, answered
from vcuda.kube.reflector import Reflector
from vcuda.ledger.ledger import LEASE_SECONDS, LOST, MARGIN_SECONDS, Ledger, Reservation
from vcuda.ledger.settle import Expired, settle
from vcuda.ledger.text import OtherFormat, read_ledger, write_ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.terms import STORABLE_SECONDS
from vcuda.requests.resources import BUILT_IN, GpuResources

KEY = "ledger"
NAMESPACE_LABEL = "quota.vcuda.io/ledger-of"

FINALIZER = "quota.vcuda.io/ledger"
"""The finalizer of a ledger. If a user deletes the ledger, it stays until the stored pods show all of its charges."""

LOOK_AGAIN_SECONDS = 0.05

_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)


class Stored(msgspec.Struct, frozen=True):
    """A ledger as it was read or written.

    ``version``: the resourceVersion of its ConfigMap; None if there is no open ledger.
    ``size``: the bytes of the ConfigMap.
    ``opens``: True if the ledger is stored closed at ``version``, and a write of this ledger opens it.
    ``deleting``: True if a user has deleted the ConfigMap, which its finalizer still keeps.
    ``answered``: the API server's time of the answer to the write, in Unix seconds; minus infinity if it is unknown.
    """

    ledger: Ledger
    version: str | None
    size: int = 0
    opens: bool = False
    deleting: bool = False
    answered: float = -math.inf


class NamedLedger(msgspec.Struct, frozen=True):
    """A ledger as the watch delivered it. `read` decodes it on demand, because most versions are never read."""

    namespace: str
    config_map: k8s_types.ConfigMap

    @property
    def deleting(self) -> bool:
        """True if a user has deleted the ConfigMap, which its finalizer still keeps."""
        return self.config_map.metadata.deletion_timestamp is not None

    def read(self) -> Stored:
        """Return the decoded ledger. Raises UnreadableLedger if its text is damaged."""
        return _read(self.config_map)

    @property
    def counted(self) -> str:
        """The part of the ledger's text that has the counts of stored objects and their versions."""
        return _counted_in((self.config_map.data or {}).get(KEY, ""))

    @property
    def pending_bytes(self) -> int:
        """The length of the other part of the text, which has the pending, terminating and reserved charges."""
        return len((self.config_map.data or {}).get(KEY, "")) - len(self.counted)


# With this value the API server drops the managed fields at an update (Server-Side Apply, "Clearing managedFields").
# Managed fields are a quarter of the API server's work for a write, and no tool applies a ledger.
NOT_TRACKED: Sequence[Mapping[str, str]] = ({},)


class LedgerStore(NamespaceCounter):
    """Reads and writes ledgers. A write that replaces an old version raises Conflict.

    ``nodes`` returns the nodes. A pod that is not pinned to a model is charged the model of its node.
    ``resources`` returns the resources that pods can request.
    ``claim_price`` returns the function that charges a claim; None before the devices have been read.
    ``storable_seconds``: the time after which a pod that was charged in a lost ledger can no longer be stored.
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
        self._namespace = namespace
        self._sleep = sleep
        # By namespace, the counts in the ledger that this process wrote last. The watch uses them to recognise the
        # writes of this process.
        self._written: dict[str, str] = {}
        self._keeps_written = False
        # By namespace, the version of the mark that remains after its ledger was deleted.
        self._dropped: dict[str, str] = {}
        self._collection = f"/api/v1/namespaces/{client.segment(namespace)}/configmaps"
        self._marks = LedgerMarks(kube, self._collection, storable_seconds, clock)
        self.check_lost = self._marks.check_lost
        # After this time, every object that was admitted when a ledger was last seen is stored, or never will be.
        self._versions = SeenVersions(storable_seconds + LEASE_SECONDS + MARGIN_SECONDS, clock)

    def read(self, namespace: str, timeout: float = 10) -> Stored:
        """Return the newest ledger for reading. If there is no open ledger, return a count of the pods by a LIST.

        ``timeout``: seconds for each call. Raises UnreadableLedger if the ledger is damaged. Raises LedgerLost if a
        ledger was lost, and pods that were charged in that ledger may still be stored.
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

    def open(self, namespace: str, timeout: float = 10) -> Stored:
        """Return the newest ledger for writing. If the ledger is missing, it is created. If it is closed, the pods are
        counted, and the next write opens it.

        Raises the errors of `read`, Conflict if another writer was first, and WriteUnanswered if the outcome of a write
        is unknown. After an error the caller may call `open` again, which continues the work.
        """
        while True:
            stored = self._stored(namespace, timeout) or self._created(namespace, timeout)
            if stored is None:
                continue  # another replica has created it
            if (lost := stored.ledger.lost) is None:
                return stored
            version = str(stored.version)
            # If the namespace never had a ledger, no charge can be missing. So this replica need not wait.
            if not self._marks.claim(namespace, version, lost, timeout):
                if self._awaits_opening(namespace, lost):
                    continue
                # A replica that has read the older mark must no longer be able to remove the mark.
                self._marks.renew(namespace, timeout)
            return msgspec.structs.replace(stored, ledger=self._counted(namespace, stored.ledger, timeout), opens=True)

    def _awaits_opening(self, namespace: str, lost: Reservation) -> bool:
        """Return True after a short sleep, if another replica may be opening the ledger. False if this replica may open
        it.

        Raises LedgerLost if pods that were charged in a lost ledger may still be stored.
        """
        try:
            self.check_lost(namespace, lost)
        except errors.LedgerLost as error:
            if error.missing >= OPENING_SECONDS:
                raise
            self._sleep(LOOK_AGAIN_SECONDS)
            return True
        return False

    def _counted(self, namespace: str, ledger: Ledger, timeout: float) -> Ledger:
        """List the pods. Return an open ledger with the counts of this LIST."""
        observed = self.count_pods(namespace, timeout)
        counted = settle(ledger, observed, Expired(reaped={LOST}), counted_since=observed.resource_version)
        if counted.lost:
            raise errors.Unavailable("the ledger was counted by a newer quota ConfigMap than this replica has read")
        return counted

    def _stored(self, namespace: str, timeout: float) -> Stored | None:
        newest = self._versions.newest(namespace)
        try:
            raw = self.kube.get(self._path(namespace), timeout=timeout)
        except errors.NotFound:
            return None
        stored = _read(_CONFIG_MAP.decode(raw), len(raw))
        if int(stored.version or 0) < newest:
            return self._closed(namespace, stored, timeout)
        self._note(namespace, stored)
        return stored

    def _created(self, namespace: str, timeout: float) -> Stored | None:
        """Create a closed ledger, and return it. None if a ledger exists already."""
        newest, ledger = self._versions.newest(namespace), Ledger(reserved={LOST: _everything()})
        body = self._encode(namespace, ledger, None)
        try:
            stored = _written(ledger, lambda: self.kube.post_heard(self._collection, body, timeout=timeout))
        except errors.Conflict:
            return None
        if int(stored.version or 0) < newest:
            self._marks.renew(namespace, timeout)  # an earlier ledger was deleted together with its mark
        self._note(namespace, stored, anew=True)
        return stored

    def _closed(self, namespace: str, stored: Stored, timeout: float) -> Stored | None:
        """Close a ledger whose version is older than a version seen before, because etcd was restored. Pods that were
        charged in the newer version may still be stored."""
        self._marks.renew(namespace, timeout)
        ledger = msgspec.structs.replace(stored.ledger, reserved={**stored.ledger.reserved, LOST: _everything()})
        body = self._encode(namespace, ledger, stored.version)
        try:
            closed = _written(ledger, lambda: self.kube.put_heard(self._path(namespace), body, timeout=timeout))
        except (errors.Conflict, errors.NotFound):
            return None
        self._note(namespace, closed, anew=True)
        return closed

    def _note(self, namespace: str, stored: Stored, *, anew: bool = False) -> None:
        self._versions.note(namespace, stored.version, anew=anew)
        if stored.ledger.lost is None:
            self._marks.opened(namespace)

    def write(self, namespace: str, ledger: Ledger, replaced: Stored, timeout: float = 10) -> Stored:
        """Replace the ledger that was read or opened. Raises Conflict if it has changed since, or WriteUnanswered."""
        if replaced.version is None:
            raise ValueError(namespace)  # a programming error: a ledger without a version must be opened before a write
        body = self._encode(namespace, ledger, replaced.version)
        try:
            stored = _written(ledger, lambda: self.kube.put_heard(self._path(namespace), body, timeout=timeout))
        except errors.NotFound as error:
            # The version that was read does not exist any more, as after any other write.
            raise errors.Conflict(error.status, error.message) from error
        self._note(namespace, stored)
        return stored

    def drop(self, namespace: str, version: str) -> None:
        """Delete the ledger and its mark, if the ledger still has ``version``. Otherwise raises Conflict or NotFound.

        The caller must ensure that the stored pods show all of its charges, because a new ledger may open at once.
        """
        # The current mark belongs to this ledger. If a ledger is opened later, its mark has another version.
        mark = self._marks.current(namespace)
        patch = {"metadata": {"resourceVersion": version, "finalizers": None}}
        raw = self.kube.patch(self._path(namespace), msgspec.json.encode(patch), client.MERGE_PATCH)
        left = _CONFIG_MAP.decode(raw).metadata
        # If a user had deleted the ConfigMap before, it disappeared when this patch removed its finalizer.
        if left.deletion_timestamp is None:
            preconditions = {"resourceVersion": left.resource_version}
            with contextlib.suppress(errors.NotFound):
                self.kube.delete(self._path(namespace), msgspec.json.encode({"preconditions": preconditions}))
        self._written.pop(namespace, None)
        if mark:
            self._dropped[namespace] = mark
        self.finish_drop(namespace)

    def finish_drop(self, namespace: str) -> None:
        """Delete the mark of a ledger that this process deleted, if the mark still exists."""
        if mark := self._dropped.get(namespace):
            # A mark of another version belongs to a newer ledger.
            with contextlib.suppress(errors.Conflict, errors.NotFound):
                self._marks.remove(namespace, mark)
            del self._dropped[namespace]

    def reflector(
        self, on_change: Callable[[str], None], on_charge: Callable[[str, int], None] | None = None
    ) -> Reflector[NamedLedger]:
        """Return a reflector of all ledgers. ``on_change`` is called with the namespace after a ledger changed.

        If ``on_charge`` is given, it is called instead in two cases: the counts of stored objects have not changed, or
        this process wrote them. It gets the namespace, and the bytes of the pending, terminating and reserved charges.
        """

        def on_event(old: NamedLedger | None, new: NamedLedger | None) -> None:
            # Every write of every replica causes this call. So texts are compared, and nothing is decoded.
            known = old and new and new.counted in (old.counted, self._written.get(new.namespace))
            if on_charge and new and known and not new.deleting and new.pending_bytes:
                on_charge(new.namespace, new.pending_bytes)
            elif changed := new or old:
                on_change(changed.namespace)

        self._keeps_written = on_charge is not None

        selector = {"labelSelector": NAMESPACE_LABEL}
        return Reflector(self.kube, self._collection, self._decode_named, params=selector, on_event=on_event)

    def key(self, namespace: str) -> watch.Key:
        return watch.Key(self._namespace, ledger_name(namespace))

    def _decode_named(self, raw: bytes) -> NamedLedger:
        config_map = _CONFIG_MAP.decode(raw)
        return NamedLedger((config_map.metadata.labels or {})[NAMESPACE_LABEL], config_map)

    def _encode(self, namespace: str, ledger: Ledger, version: str | None) -> bytes:
        metadata = {
            "name": ledger_name(namespace),
            "namespace": self._namespace,
            "labels": {"app.kubernetes.io/managed-by": "vcuda-quota", NAMESPACE_LABEL: namespace},
            "finalizers": [FINALIZER],
            "managedFields": NOT_TRACKED,
            **({"resourceVersion": version} if version is not None else {}),
        }
        data = {KEY: write_ledger(ledger)}
        if self._keeps_written:
            self._written[namespace] = _counted_in(data[KEY])
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def _path(self, namespace: str) -> str:
        return f"{self._collection}/{client.segment(ledger_name(namespace))}"


def ledger_name(namespace: str) -> str:
    return f"gpu-ledger-{namespace}"


def _written(ledger: Ledger, write: Callable[[], client.Heard]) -> Stored:
    heard = answered(write)
    metadata = _CONFIG_MAP.decode(heard.body).metadata
    at, deleting = heard.date.timestamp() if heard.date else -math.inf, metadata.deletion_timestamp is not None
    return Stored(ledger, metadata.resource_version, len(heard.body), deleting=deleting, answered=at)


def _everything() -> Reservation:
    # The random counter identifies this ledger. So the age of another closed ledger is not taken for its age.
    return Reservation({}, secrets.randbits(53))


def _counted_in(text: str) -> str:
    return text.partition(',"pending":')[0]


def _read(config_map: k8s_types.ConfigMap, size: int = 0) -> Stored:
    metadata = config_map.metadata
    try:
        ledger = read_ledger((config_map.data or {})[KEY])
    except (KeyError, ValueError) as error:
        name = f"{metadata.namespace}/{metadata.name}"
        # To delete a ledger of another release would lose its charges, which that release can read.
        advice = "have all parts run one release" if isinstance(error, OtherFormat) else "delete it to have it rebuilt"
        message = f"ledger {name} cannot be read ({error}); {advice}"
        raise errors.UnreadableLedger(message) from error
    return Stored(ledger, metadata.resource_version, size, deleting=metadata.deletion_timestamp is not None)
