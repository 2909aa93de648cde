"""The journals: one ConfigMap per node, in which the extender records which pod has which cards of the node.

Tenants can patch the annotations of pods. So the extender writes annotations for the device plugin, but trusts only the
journals. A placement (the node and the cards of one pod) is stored in the journal of the node before the scheduler gets
the answer. The placement stays there until the pod has ended, was deleted, or is bound to another node.

Every write of a journal is a compare-and-swap: the API server stores it only if the journal still has the version by
which the extender decided. So two controllers never assign the same part of a card, even if both act as the leader and
their clocks differ.

The extender creates the ConfigMap when it first sees the node. Only at that time does it read the annotations of the
pods that are already bound to the node.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from vcuda import errors, kube
from vcuda.allocations.cards import Share
from vcuda.k8s_types import UNDECODABLE, ConfigMap, Decoder
from vcuda.ledger.ledger import is_older

PREFIX = "gpu-placements."
KEY = "placements"
LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "app.kubernetes.io/component": "gpu-placements"}
SELECTOR = "app.kubernetes.io/component=gpu-placements"
TIMEOUT = 3.0
"""The timeout of one call to the API server, in seconds."""

MAX_PLACEMENTS = 1000
"""The most placements in the journal of one node, so that the ConfigMap stays below the API server's limit of 1 MiB."""

_MAX_NAME = 253


class JournalEntry(msgspec.Struct, frozen=True):
    """The placement of one pod on one node, as the journal of the node records it.

    ``shares``: the shares (parts of cards) of each container, by the index of the container.
    ``placed``: the Unix time of the placement.
    ``binding``: the pod's resourceVersion in the binding that was sent; empty if no binding was sent. The API server
    stores the binding only if the pod still has this version.
    ``ends``: the Unix time until which the containers of a deleted pod may still run; None if the pod exists.
    """

    uid: str
    namespace: str
    name: str
    shares: Mapping[int, tuple[Share, ...]]
    placed: int
    binding: str = ""
    ends: int | None = None

    def all_shares(self) -> tuple[Share, ...]:
        return tuple(share for shares in self.shares.values() for share in shares)

    def may_be_bound(self, version: str) -> bool:
        """Return True if a sent binding may still be stored. ``version``: a version at which the pod was not bound."""
        return bool(self.binding) and not is_older(self.binding, version)


class NodeJournal(msgspec.Struct, frozen=True):
    """The journal of one node (placements by pod uid). ``version``: its resourceVersion; empty if never stored."""

    node: str
    version: str = ""
    entries: Mapping[str, JournalEntry] = {}


class _Written(msgspec.Struct, frozen=True):
    """The JSON of a node's journal in its ConfigMap. ``format``: the version of this format, for later releases."""

    node: str
    placements: tuple[JournalEntry, ...]
    format: int = 1


_CONFIG_MAP = Decoder(ConfigMap)
_WRITTEN = msgspec.json.Decoder(_Written)


class Journal:
    """Reads and writes the journals of all nodes, which are ConfigMaps in ``namespace``."""

    def __init__(self, api: kube.Kube, namespace: str) -> None:
        self._kube = api
        self._namespace = namespace
        self._collection = f"/api/v1/namespaces/{kube.segment(namespace)}/configmaps"

    def read_all(self) -> Iterator[NodeJournal]:
        """Yield the journals of all nodes. Malformed journals are left out. Raises Unavailable."""
        for page in self._kube.list_pages(self._collection, {"labelSelector": SELECTOR}):
            for raw in page.items:
                with suppress(errors.UnreadableJournal):
                    yield self._decoded(raw)

    def read(self, node: str, timeout: float = TIMEOUT) -> NodeJournal:
        """Return the journal of a node. Raises NotFound, Unavailable, or UnreadableJournal if it is malformed."""
        return self._decoded(self._kube.get(self._path(node), timeout=timeout))

    def write(self, journal: NodeJournal, timeout: float = TIMEOUT) -> NodeJournal:
        """Store a node's journal, and return the journal with its new version.

        Raises Conflict if another version is stored, NotPlaced if the journal would become too large, and Unavailable
        if the outcome is unknown.
        """
        if len(journal.entries) > MAX_PLACEMENTS:
            raise errors.NotPlaced(f"node {journal.node} already has the maximum of {MAX_PLACEMENTS} pods with cards")
        if journal.version:
            try:
                answer = self._kube.put(self._path(journal.node), self._manifest(journal), timeout=timeout)
            except errors.NotFound:  # Somebody has deleted the ConfigMap of the node. Create the ConfigMap again.
                return self.write(msgspec.structs.replace(journal, version=""), timeout)
        else:
            answer = self._kube.post(self._collection, self._manifest(journal), timeout=timeout)
        return msgspec.structs.replace(journal, version=_CONFIG_MAP.decode(answer).metadata.resource_version)

    def delete(self, journal: NodeJournal) -> None:
        """Delete the journal of a deleted node. Raises Conflict if another version of the journal is stored."""
        options = {"preconditions": {"resourceVersion": journal.version}}
        self._kube.delete(self._path(journal.node), msgspec.json.encode(options), timeout=TIMEOUT)

    def _path(self, node: str) -> str:
        return f"{self._collection}/{kube.segment(name_of(node))}"

    def _decoded(self, raw: bytes) -> NodeJournal:
        config_map = _CONFIG_MAP.decode(raw)
        metadata = config_map.metadata
        try:
            written = _WRITTEN.decode((config_map.data or {})[KEY])
        except (KeyError, *UNDECODABLE) as error:
            raise errors.UnreadableJournal(
                f"ConfigMap {self._namespace}/{metadata.name} cannot be read: {error}. Delete this ConfigMap. The"
                " extender then creates it again from the pods that are bound to the node."
            ) from error
        return NodeJournal(written.node, metadata.resource_version, {each.uid: each for each in written.placements})

    def _manifest(self, journal: NodeJournal) -> bytes:
        metadata = {
            "name": name_of(journal.node),
            "namespace": self._namespace,
            "labels": LABELS,
            "managedFields": kube.NOT_TRACKED,
            # With a resourceVersion, a PUT is a compare-and-swap. Otherwise the PUT would overwrite any version.
            **({"resourceVersion": journal.version} if journal.version else {}),
        }
        text = msgspec.json.encode(_Written(journal.node, tuple(journal.entries.values()))).decode()
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text}})


def name_of(node: str) -> str:
    """Return the name of a journal's ConfigMap. It ends with the node's name, or with a hash of a long name."""
    if len(PREFIX + node) <= _MAX_NAME:
        return PREFIX + node
    return PREFIX + hashlib.sha256(node.encode()).hexdigest()
