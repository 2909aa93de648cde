"""Ledgers kept in the cluster: one ConfigMap per limited namespace, written by compare-and-swap.

They live in a namespace of their own, where tenants have no rights: so a right to ledgers, whose names nobody can list
beforehand, is a right to nothing else.
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
from vcuda.kube.turns import ListTurns
from vcuda.ledger.ledger import (
    LEASE_SECONDS,
    LOST,
    MARGIN_SECONDS,
    STORABLE_SECONDS,
    Ledger,
    Reservation,
)
from vcuda.ledger.settle import Expired, settle
from vcuda.ledger.text import OtherFormat, read_ledger, write_ledger
from vcuda.placement.placement import Nodes
from vcuda.requests.resources import BUILT_IN, GpuResources

KEY = "ledger"
NAMESPACE_LABEL = "quota.vcuda.io/ledger-of"

FINALIZER = "quota.vcuda.io/ledger"
"""Keeps a ledger whose deletion was asked for until nothing is charged in it that pods do not show."""

LOOK_AGAIN_SECONDS = 0.05

_CONFIG_MAP = msgspec.json.Decoder(k8s_types.ConfigMap)


class Stored(msgspec.Struct, frozen=True):
    """A ledger, the resourceVersion of its ConfigMap (None where there is no open one), and its size in bytes.

    ``opens``: at that version it is closed, and this is what opens it. ``deleting``: somebody has asked for its
    deletion. ``answered``: when the API server says it has written it, in Unix seconds, and before all time where it
    says nothing.
    """

    ledger: Ledger
    version: str | None
    size: int = 0
    opens: bool = False
    deleting: bool = False
    answered: float = -math.inf


class NamedLedger(msgspec.Struct, frozen=True):
    """A ledger as the watch brought it, with the namespace it is of.

    It is read only when it is asked for: under load one is written many times between two looks at it.
    """

    namespace: str
    config_map: k8s_types.ConfigMap

    @property
    def deleting(self) -> bool:
        """Whether somebody has asked for its deletion."""
        return self.config_map.metadata.deletion_timestamp is not None

    def read(self) -> Stored:
        """Return the ledger. Raises UnreadableLedger: it is damaged."""
        return _read(self.config_map)

    @property
    def counted(self) -> str:
        """The part of its text that tells what was counted, at which version."""
        return _counted_in((self.config_map.data or {}).get(KEY, ""))

    @property
    def pending_bytes(self) -> int:
        """The length of what it tells beside that: what is pending, terminating and reserved."""
        return len((self.config_map.data or {}).get(KEY, "")) - len(self.counted)


# Has the API server drop, at an update, what it notes of who set which field (Server-Side Apply, "Clearing
# managedFields"). Nobody applies a ledger, and keeping the notes is a quarter of what the API server does for a write.
NOT_TRACKED: Sequence[Mapping[str, str]] = ({},)


class LedgerStore(NamespaceCounter):
    """Reads and writes ledgers; whoever writes an old version loses, by Conflict.

    ``nodes`` tells the model of a pod that is held to none by its spec but runs on a node that has one; ``resources``
    what pods can ask for now; ``claim_price`` what claims take, None as long as devices have not been read. After
    ``storable_seconds`` a pod that was charged in a ledger that is lost can no longer be stored. ``turns`` are shared
    with nobody else.
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
        turns: ListTurns | None = None,
    ) -> None:
        super().__init__(kube, nodes, resources, claim_price, turns or ListTurns())
        self._namespace = namespace
        self._sleep = sleep
        # By namespace what was last counted in a ledger that was written here, where a watch is to know it again.
        self._written: dict[str, str] = {}
        self._keeps_written = False
        # By namespaces whose ledger was dropped, the version of the mark that it leaves.
        self._dropped: dict[str, str] = {}
        self._collection = f"/api/v1/namespaces/{client.segment(namespace)}/configmaps"
        self._marks = LedgerMarks(kube, self._collection, storable_seconds, clock)
        self.check_lost = self._marks.check_lost
        # What was granted when a ledger was last seen is stored after so long, or never will be.
        self._versions = SeenVersions(storable_seconds + LEASE_SECONDS + MARGIN_SECONDS, clock)

    def read(self, namespace: str, timeout: float = 10) -> Stored:
        """Return the newest ledger, not to be written; where there is no open one, what a LIST of the pods counts.

        ``timeout`` is in seconds, for each call. Raises UnreadableLedger: it is damaged. LedgerLost: one was lost, and
        pods that were charged in it may still be stored.
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
        """Return the newest ledger to be written; where there is none it is made, and one that is closed is counted.

        Raises the same as `read`, and Conflict: somebody else wrote first. WriteUnanswered: it is not known what became
        of a write; called again, this goes on from there.
        """
        while True:
            stored = self._stored(namespace, timeout) or self._created(namespace, timeout)
            if stored is None:
                continue  # another has made it
            if (lost := stored.ledger.lost) is None:
                return stored
            version = str(stored.version)
            # Where it never had one no other ledger can hold what this one does not: so who marks it need not wait.
            if not self._marks.claim(namespace, version, lost, timeout):
                if self._awaits_opening(namespace, lost):
                    continue
                # Whoever has seen a mark before may no longer take it away.
                self._marks.renew(namespace, timeout)
            return msgspec.structs.replace(stored, ledger=self._counted(namespace, stored.ledger, timeout), opens=True)

    def _awaits_opening(self, namespace: str, lost: Reservation) -> bool:
        """Return whether to look again, as another may be opening it; False where it may be opened by its age."""
        try:
            self.check_lost(namespace, lost)
        except errors.LedgerLost as error:
            if error.missing >= OPENING_SECONDS:
                raise
            self._sleep(LOOK_AGAIN_SECONDS)
            return True
        return False

    def _counted(self, namespace: str, ledger: Ledger, timeout: float) -> Ledger:
        """Return a ledger that is open, with what a LIST counts from now on."""
        observed = self.count_pods(namespace, timeout)
        counted = settle(ledger, observed, Expired(reaped={LOST}), counted_since=observed.resource_version)
        if counted.lost:
            raise errors.Unavailable("this replica knows an older quota ConfigMap than the ledger was counted by")
        return counted

    def _stored(self, namespace: str, timeout: float) -> Stored | None:
        newest = self._versions.newest(namespace)
        try:
            raw = self._kube.get(self._path(namespace), timeout=timeout)
        except errors.NotFound:
            return None
        stored = _read(_CONFIG_MAP.decode(raw), len(raw))
        if int(stored.version or 0) < newest:
            return self._closed(namespace, stored, timeout)
        self._note(namespace, stored)
        return stored

    def _created(self, namespace: str, timeout: float) -> Stored | None:
        """Make a ledger in which nobody may charge yet; None where there is one, or somebody else makes it."""
        newest, ledger = self._versions.newest(namespace), Ledger(reserved={LOST: _everything()})
        body = self._encode(namespace, ledger, None)
        try:
            stored = _written(ledger, lambda: self._kube.post_heard(self._collection, body, timeout=timeout))
        except errors.Conflict:
            return None
        if int(stored.version or 0) < newest:
            self._marks.renew(namespace, timeout)  # it was there, and what marked it is gone with it
        self._note(namespace, stored, anew=True)
        return stored

    def _closed(self, namespace: str, stored: Stored, timeout: float) -> Stored | None:
        """Close a ledger to which etcd was set back: charges that were in later versions may still be stored."""
        self._marks.renew(namespace, timeout)
        ledger = msgspec.structs.replace(stored.ledger, reserved={**stored.ledger.reserved, LOST: _everything()})
        body = self._encode(namespace, ledger, stored.version)
        try:
            closed = _written(ledger, lambda: self._kube.put_heard(self._path(namespace), body, timeout=timeout))
        except (errors.Conflict, errors.NotFound):
            return None
        self._note(namespace, closed, anew=True)
        return closed

    def _note(self, namespace: str, stored: Stored, *, anew: bool = False) -> None:
        self._versions.note(namespace, stored.version, anew=anew)
        if stored.ledger.lost is None:
            self._marks.opened(namespace)

    def write(self, namespace: str, ledger: Ledger, replaced: Stored, timeout: float = 10) -> Stored:
        """Write a ledger in place of the one that was read, or opened.

        Returns it as stored. Raises Conflict: another writer was first, or it has been deleted. WriteUnanswered.
        """
        if replaced.version is None:
            raise ValueError(namespace)  # a fault of ours: it was read, and has to be opened before it is written
        body = self._encode(namespace, ledger, replaced.version)
        try:
            stored = _written(ledger, lambda: self._kube.put_heard(self._path(namespace), body, timeout=timeout))
        except errors.NotFound as error:
            # What was read is gone, as after any other write: read again.
            raise errors.Conflict(error.status, error.message) from error
        self._note(namespace, stored)
        return stored

    def drop(self, namespace: str, version: str) -> None:
        """Delete the ledger, if it is still the one read at ``version``; else Conflict, or NotFound.

        Its mark goes too: then who needs one after that makes it anew at once. So there is to be nothing in it that
        pods do not show.
        """
        # The mark as it is now belongs to this ledger: another that is opened after it has one of another version.
        mark = self._marks.current(namespace)
        patch = {"metadata": {"resourceVersion": version, "finalizers": None}}
        raw = self._kube.patch(self._path(namespace), msgspec.json.encode(patch), client.MERGE_PATCH)
        left = _CONFIG_MAP.decode(raw).metadata
        # Where its deletion was asked for before, it went with its finalizer.
        if left.deletion_timestamp is None:
            preconditions = {"resourceVersion": left.resource_version}
            with contextlib.suppress(errors.NotFound):
                self._kube.delete(self._path(namespace), msgspec.json.encode({"preconditions": preconditions}))
        self._written.pop(namespace, None)
        if mark:
            self._dropped[namespace] = mark
        self.finish_drop(namespace)

    def finish_drop(self, namespace: str) -> None:
        """Take away the mark of a ledger that was dropped, where that is still to be done."""
        if mark := self._dropped.get(namespace):
            # Where it is of another version by now there is another ledger.
            with contextlib.suppress(errors.Conflict, errors.NotFound):
                self._marks.remove(namespace, mark)
            del self._dropped[namespace]

    def reflector(
        self, on_change: Callable[[str], None], on_charge: Callable[[str, int], None] | None = None
    ) -> Reflector[NamedLedger]:
        """Return a reflector of all ledgers; ``on_change`` is called with the namespace of each that is written.

        Where there is ``on_charge``, that is called instead where what is counted is as it was, or as it was written
        here, with the bytes in which the ledger tells what is charged beside that.
        """

        def on_event(old: NamedLedger | None, new: NamedLedger | None) -> None:
            # This is called at every write of every replica: their texts are compared, not read.
            known = old and new and new.counted in (old.counted, self._written.get(new.namespace))
            if on_charge and new and known and not new.deleting and new.pending_bytes:
                on_charge(new.namespace, new.pending_bytes)
            elif changed := new or old:
                on_change(changed.namespace)

        self._keeps_written = on_charge is not None

        selector = {"labelSelector": NAMESPACE_LABEL}
        return Reflector(self._kube, self._collection, self._decode_named, params=selector, on_event=on_event)

    def key(self, namespace: str) -> watch.Key:
        """Return the key under which the reflector holds a namespace's ledger."""
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
    """Return the name of the ConfigMap that holds a namespace's ledger."""
    return f"gpu-ledger-{namespace}"


def _written(ledger: Ledger, write: Callable[[], client.Heard]) -> Stored:
    heard = answered(write)
    metadata = _CONFIG_MAP.decode(heard.body).metadata
    at, deleting = heard.date.timestamp() if heard.date else -math.inf, metadata.deletion_timestamp is not None
    return Stored(ledger, metadata.resource_version, len(heard.body), deleting=deleting, answered=at)


def _everything() -> Reservation:
    # Whoever measures its age tells it by the counter from that of every other ledger.
    return Reservation({}, secrets.randbits(53))


def _counted_in(text: str) -> str:
    return text.partition(',"pending":')[0]


def _read(config_map: k8s_types.ConfigMap, size: int = 0) -> Stored:
    metadata = config_map.metadata
    try:
        ledger = read_ledger((config_map.data or {})[KEY])
    except (KeyError, ValueError) as error:
        name = f"{metadata.namespace}/{metadata.name}"
        # To delete one of another release would lose what is charged in it, and that release can read it.
        advice = "have all parts run one release" if isinstance(error, OtherFormat) else "delete it to have it rebuilt"
        message = f"ledger {name} cannot be read ({error}); {advice}"
        raise errors.UnreadableLedger(message) from error
    return Stored(ledger, metadata.resource_version, size, deleting=metadata.deletion_timestamp is not None)
