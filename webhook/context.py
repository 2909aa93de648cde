"""What decisions are made from besides the pod itself: the quota in force, the nodes, and the system's settings."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from vcuda import errors, k8s_types, kube, workloads
from vcuda.placement import affinity, placement
from vcuda.quota import document, model
from webhook import ledgers


class PolicySnapshot(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision.

    What is pending, and was never stored, is given back ``storable_seconds`` after it was charged; None: never.
    """

    quota: model.Quota
    nodes: placement.Nodes
    hints: affinity.Hints = affinity.Hints()
    storable_seconds: float | None = None


PolicySource = Callable[[], PolicySnapshot | None]
"""Returns the policy in force, or None until the quota has been read once."""


class ClusterPolicy(msgspec.Struct, frozen=True):
    """The quota and the nodes of a cluster, current to within a watch event; each watch is a thread.

    Which cards are free is published by the extender, where there is one, every few seconds; nothing waits for it.
    """

    quota: kube.QuotaInformer
    nodes: kube.NodeInformer
    cards: kube.FreeCardsInformer
    hints: affinity.Hints
    storable_seconds: float

    def current(self) -> PolicySnapshot | None:
        """Return the policy in force, or None until quota and nodes have been read once."""
        quota = self.quota.current()
        # Without its nodes every pod would be refused: no node has the model that it needs.
        if quota is None or not self.nodes.reflector.synced.is_set():
            return None
        nodes, free = self.nodes.current(), self.cards.current()
        nodes = msgspec.structs.replace(nodes, free=free) if free else nodes
        return PolicySnapshot(quota, nodes, self.hints, self.storable_seconds)

    def reflectors(self) -> Mapping[str, kube.Reflector[Any]]:
        """Return the watches by the name under which their age is exported."""
        return {"configmaps": self.quota.reflector, "nodes": self.nodes.reflector, "cards": self.cards.reflector}

    def start(self) -> None:
        """Start watching."""
        for reflector in self.reflectors().values():
            reflector.start()


# A namespace is there before the API server asks about its first pod. One that was not there may be made at any time,
# and whoever asks for others' names is not to keep them out for longer.
FOUND_SECONDS, MISSING_SECONDS = 60.0, 1.0

LOOK_UP_TIMEOUT_SECONDS = 3.0
LOOK_UP_THREADS = 4


class ExistingNamespaces:
    """Ledgers of namespaces that exist, as the API server said up to a minute ago.

    It is for callers that are not known by a certificate: whoever reaches the port names a namespace.
    """

    def __init__(
        self, charged: ledgers.Ledgers, client: kube.Kube, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._charged = charged
        self._client = client
        self._clock = clock
        self._threads = ThreadPoolExecutor(LOOK_UP_THREADS, thread_name_prefix="namespaces")
        self._known = ledgers.ByNamespace(lambda _namespace: _LookUp(), clock)

    async def charge(self, request: ledgers.ChargeRequest) -> ledgers.Decision:
        """Decide a charge and keep it, once per uid; BadReview where there is no such namespace."""
        await self._look_up(request.namespace)
        return await self._charged.charge(request)

    async def cached_usage(self, namespace: str) -> Mapping[str, model.Usage]:
        """Return what was charged a moment ago; BadReview where there is no such namespace."""
        await self._look_up(namespace)
        return await self._charged.cached_usage(namespace)

    async def usage(self, namespace: str) -> Mapping[str, model.Usage]:
        """Return what is charged; nothing in a namespace that is not there yet, as one may get its quota first."""
        return await self._charged.usage(namespace)

    async def _look_up(self, namespace: str) -> None:
        known = self._known[namespace]
        if known.until <= self._clock():
            asked = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, namespace)
            try:
                known.exists = await asyncio.wait_for(asked, LOOK_UP_TIMEOUT_SECONDS)
            except TimeoutError:
                raise errors.Unavailable("too many namespaces are being looked up at once") from None
            known.until = self._clock() + (FOUND_SECONDS if known.exists else MISSING_SECONDS)
        if not known.exists:
            raise errors.BadReview(f"there is no namespace {namespace}")

    def _ask(self, namespace: str) -> bool:
        try:
            self._client.get(f"/api/v1/namespaces/{kube.segment(namespace)}", timeout=LOOK_UP_TIMEOUT_SECONDS)
        except errors.NotFound:
            return False
        return True


class _LookUp(msgspec.Struct):
    exists: bool = False
    until: float = -math.inf


def read_quota(path: Path) -> model.Quota:
    """Return the quota in a file: the document itself, or the ConfigMap that holds it under ``gpu_quota``.

    Raises:
        BadInput: the file cannot be read, or has faults (QuotaFault, with all of them).

    """
    text = read_text(path)
    try:
        documents = list(yaml.safe_load_all(text))
    except workloads.NOT_YAML:
        documents = []  # the parser below says what is wrong, and where
    if len(documents) == 1 and isinstance(documents[0], dict) and documents[0].get("kind") == "ConfigMap":
        data = documents[0].get("data") or {}
        if "gpu_quota" not in data:
            raise errors.BadInput(f"{path}: the ConfigMap has no key gpu_quota")
        text = str(data["gpu_quota"])
    return document.parse_quota(text)


def read_nodes(path: Path, labels: affinity.NodeLabels) -> placement.Nodes:
    """Return the nodes in a file, as ``kubectl get nodes -o yaml`` prints them.

    Raises:
        BadInput: the file cannot be read or holds something else.

    """
    found = {}
    for where, manifest in workloads.objects_in(str(path), read_text(path)):
        if manifest.get("kind") != "Node":
            raise errors.BadInput(f"{where}: expected a Node, not {manifest.get('kind')}")
        node = workloads.convert(where, manifest, k8s_types.Node)
        found[node.metadata.name] = node.labels
    return placement.Nodes.of(found, labels)


def read_text(path: Path) -> str:
    """Return what is in a file, or on standard input where the path is ``-``; BadInput where it cannot be read."""
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadInput(f"{path}: cannot be read: {error}") from error
