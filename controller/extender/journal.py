"""Which cards the extender has given to whom: one ConfigMap for each node, and nothing else counts.

The owner of a pod can patch its annotations, so they are written for the device plugin and never read back. A placement
stands in the ConfigMap of its node before anybody hears of it, until its pod has ended, is gone, or is bound elsewhere.
Every write is a compare-and-swap on the version that was decided on: whoever leads, and whoever still believes that it
does, no two of them give one share, and no clock has a part in that.

The ConfigMap is made when the node is first seen. What the pods that are bound there have been given is taken over
then, from their annotations, this one time.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from vcuda import errors, kube
from vcuda.allocations.cards import Share
from vcuda.k8s_types import UNDECODABLE, ConfigMap
from vcuda.ledger.ledger import is_older

PREFIX = "gpu-placements."
KEY = "placements"
LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "app.kubernetes.io/component": "gpu-placements"}
SELECTOR = "app.kubernetes.io/component=gpu-placements"
TIMEOUT = 3.0
"""Seconds for one call to the API server."""

MAX_PLACEMENTS = 1000
"""On one node; its ConfigMap stays under 1 MiB, which is all that the API server stores."""

_MAX_NAME = 253


class JournalEntry(msgspec.Struct, frozen=True):
    """What a pod has been given on one node: shares by the number of its container, at a Unix time in seconds.

    ``binding`` is the resourceVersion of the pod at which a binding was sent, which lands at that version or never;
    empty where none was. ``ends`` is the Unix time at which kubelet has ended a pod that vanished while it ran.
    """

    uid: str
    namespace: str
    name: str
    shares: Mapping[int, tuple[Share, ...]]
    placed: int
    binding: str = ""
    ends: int | None = None

    def all_shares(self) -> tuple[Share, ...]:
        """Return the shares of all containers."""
        return tuple(share for shares in self.shares.values() for share in shares)

    def may_be_bound(self, version: str) -> bool:
        """Return whether a binding that was sent may land still, on an unbound pod that has come to ``version``."""
        return bool(self.binding) and not is_older(self.binding, version)


class NodeJournal(msgspec.Struct, frozen=True):
    """The entries of one node by pod uid, and the resourceVersion that they are stored at; empty: they are not yet."""

    node: str
    version: str = ""
    entries: Mapping[str, JournalEntry] = {}


class _Written(msgspec.Struct, frozen=True):
    """The text in a ConfigMap. ``format`` tells later releases."""

    node: str
    placements: tuple[JournalEntry, ...]
    format: int = 1


_CONFIG_MAP = msgspec.json.Decoder(ConfigMap)
_WRITTEN = msgspec.json.Decoder(_Written)


class Journal:
    """The ConfigMaps, in the system's own namespace."""

    def __init__(self, api: kube.Kube, namespace: str) -> None:
        self._kube = api
        self._namespace = namespace
        self._collection = f"/api/v1/namespaces/{kube.segment(namespace)}/configmaps"

    def read_all(self) -> Iterator[NodeJournal]:
        """Yield the journals of all nodes, but for those that are damaged. Raises Unavailable."""
        for page in self._kube.list_pages(self._collection, {"labelSelector": SELECTOR}):
            for raw in page.items:
                with suppress(errors.UnreadableJournal):
                    yield self._decoded(raw)

    def read(self, node: str, timeout: float = TIMEOUT) -> NodeJournal:
        """Return the journal of a node. Raises NotFound, Unavailable; UnreadableJournal where it is damaged."""
        return self._decoded(self._kube.get(self._path(node), timeout=timeout))

    def write(self, journal: NodeJournal, timeout: float = TIMEOUT) -> NodeJournal:
        """Store a journal; return it with its new version.

        Raises Conflict where it is stored at another version; NotPlaced where it would become too large; Unavailable
        where it may land still.
        """
        if len(journal.entries) > MAX_PLACEMENTS:
            raise errors.NotPlaced(f"{journal.node} has {MAX_PLACEMENTS} placements already")
        if journal.version:
            try:
                answer = self._kube.put(self._path(journal.node), self._manifest(journal), timeout=timeout)
            except errors.NotFound:  # somebody has deleted it: what it said is known here
                return self.write(msgspec.structs.replace(journal, version=""), timeout)
        else:
            answer = self._kube.post(self._collection, self._manifest(journal), timeout=timeout)
        return msgspec.structs.replace(journal, version=_CONFIG_MAP.decode(answer).metadata.resource_version)

    def delete(self, journal: NodeJournal) -> None:
        """Delete the journal of a node that is gone, if it is still of this version."""
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
            advice = "once it is deleted, it is made anew from the pods that are bound to the node"
            message = f"ConfigMap {self._namespace}/{metadata.name} cannot be read ({error}): {advice}"
            raise errors.UnreadableJournal(message) from error
        return NodeJournal(written.node, metadata.resource_version, {each.uid: each for each in written.placements})

    def _manifest(self, journal: NodeJournal) -> bytes:
        metadata = {
            "name": name_of(journal.node),
            "namespace": self._namespace,
            "labels": LABELS,
            "managedFields": kube.NOT_TRACKED,
            # What makes a PUT a compare-and-swap: without it the API server takes any.
            **({"resourceVersion": journal.version} if journal.version else {}),
        }
        text = msgspec.json.encode(_Written(journal.node, tuple(journal.entries.values()))).decode()
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: text}})


def name_of(node: str) -> str:
    """Return the name of a node's ConfigMap: with the node's own name in it, or its hash where that is too long."""
    if len(PREFIX + node) <= _MAX_NAME:
        return PREFIX + node
    return PREFIX + hashlib.sha256(node.encode()).hexdigest()
