"""Lists the pods that exist on a node, from the API server, from a file, or from kubelet's directory."""

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from controller.garbage.node.names import KeepReason, MustStay, present_uids
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, Reflector

PODS = "/api/v1/pods"

# If no event arrives for this long, the watch is out of date. A working watch gets a bookmark about once a minute.
FRESH_SECONDS = 120.0

_CONFIRMED_FOR = 5.0  # Seconds for which a LIST of pods is reused, so that a thousand directories need few LISTs.


class PodSource(Protocol):
    """Lists the pods that exist on the node.

    Both methods raise MustStay if the list is not reliable, and VcudaError if the API server does not answer.
    """

    def known(self) -> frozenset[str]:
        """Return the uids of the node's pods in any phase. For a mirror pod, include the uid of its static pod."""

    def confirmed(self) -> frozenset[str]:
        """Return the same uids as `known`, from a list that is at most a few seconds old."""


class _PodMeta(msgspec.Struct, frozen=True, gc=False):
    uid: str  # `uid` has no default value, so a pod without a uid cannot be decoded.
    namespace: str = ""
    annotations: Mapping[str, str] | None = None


class _NodePodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    node_name: str = ""


class _NodePod(msgspec.Struct, frozen=True, gc=False):
    metadata: _PodMeta
    kind: str = "Pod"
    spec: _NodePodSpec = _NodePodSpec()

    def uids(self) -> tuple[str, ...]:
        return tuple(present_uids(self.metadata.uid, self.metadata.annotations))


class _PodListMeta(msgspec.Struct, frozen=True, rename="camel"):
    continue_: str = msgspec.field(name="continue", default="")
    remaining_item_count: int | None = None


class _PodList(msgspec.Struct, frozen=True):
    kind: str
    items: list[_NodePod]
    metadata: _PodListMeta = _PodListMeta()


_POD = Decoder(_NodePod)


def read_uids(raw: bytes) -> tuple[str, ...]:
    """Return the uid in a pod's JSON and, for a mirror pod, the uid of its static pod. Raises `UNDECODABLE` errors."""
    return _POD.decode(raw).uids()


def on_node(node: str) -> dict[str, str | int]:
    return {"fieldSelector": f"spec.nodeName={node}"}


def list_uids(kube: Kube, node: str) -> frozenset[str]:
    """Return the uids of the node's pods by a consistent LIST. Raises VcudaError if any pod cannot be read."""
    # A LIST without resourceVersion is a quorum read from etcd. Its pages show one version (Kubernetes API concepts,
    # "Retrieving large results sets in chunks"). So no pod that was bound to the node before the LIST is missing.
    found: set[str] = set()
    try:
        for page in kube.list_pages(PODS, on_node(node)):
            for raw in page.items:
                found.update(read_uids(raw))
    except k8s_types.UNDECODABLE as error:
        raise errors.Unavailable(f"GET {PODS} returned a pod that cannot be read: {error}") from error
    return frozenset(found)


def validate_listing(uids: frozenset[str], own_uid: str | None) -> frozenset[str]:
    """Return ``uids``. Raises MustStay if they cannot be the uids of all pods on this node.

    ``own_uid``: the uid of the agent's pod. A list without it is incomplete, or from another node or cluster.
    """
    if own_uid is not None and own_uid not in uids:
        raise MustStay(KeepReason.PODS_UNKNOWN, "the list of this node's pods does not include the agent's own pod")
    if not uids:  # If the agent's own uid is unknown, only an empty list of pods is recognized as incomplete.
        raise MustStay(KeepReason.PODS_UNKNOWN, "the list of this node's pods is empty")
    return uids


class RecentPodList:
    """Lists the node's pods. A list is reused for 5 s. ``clock``: returns the time of a monotonic clock, in seconds."""

    def __init__(self, kube: Kube, node: str, own_uid: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._node = node
        self._own_uid = own_uid
        self._clock = clock
        self._made = -math.inf
        self._uids: frozenset[str] = frozenset()

    def known(self) -> frozenset[str]:
        began = self._clock()
        if began - self._made > _CONFIRMED_FOR:
            self._uids = validate_listing(list_uids(self._kube, self._node), self._own_uid)
            self._made = began
        return self._uids

    confirmed = known


@dataclass(frozen=True, slots=True)
class FixedPods:
    """The pods in a file, which the user has given instead of access to the API."""

    uids: frozenset[str]

    def known(self) -> frozenset[str]:
        return self.uids

    confirmed = known


class WatchedPods:
    """Watches the node's pods. `confirmed` uses a LIST of the last 5 s. ``on_gone``: called when a pod is deleted."""

    def __init__(
        self, kube: Kube, node: str, own_uid: str | None, kubelet: "KubeletPods | None", *, on_gone: Callable[[], None]
    ) -> None:
        self._own_uid = own_uid
        self._kubelet = kubelet
        self._on_gone = on_gone
        self._former: dict[str, frozenset[str]] = {}
        self._listing = RecentPodList(kube, node, own_uid)
        self.reflector = Reflector(kube, PODS, read_uids, params=on_node(node), on_event=self._on_event)

    def known(self) -> frozenset[str]:
        """Return the uids of the watched pods. Raises MustStay before the first list, or if the watch is outdated."""
        if not self.reflector.synced.is_set():
            raise MustStay(KeepReason.PODS_UNKNOWN, "the first list of this node's pods is not complete")
        age = self.reflector.last_event_age(time.monotonic())
        if age > FRESH_SECONDS or not self.reflector.alive:
            raise MustStay(KeepReason.PODS_UNKNOWN, "the watch of pods has ended, or has had no event for too long")
        return validate_listing(self._with_former_mirrors(), self._own_uid)

    def confirmed(self) -> frozenset[str]:
        return self._listing.known()

    def _with_former_mirrors(self) -> frozenset[str]:
        # If a mirror pod is deleted, kubelet creates one with a new uid. Its static pod still uses the directory with
        # the old uid. So add the uids of deleted mirror pods whose static pods still run. Mirror pods that were deleted
        # before this watch began are unknown. With hostPID, the mounts of running containers protect their directories.
        uids = {uid for uids in self.reflector.snapshot().values() for uid in uids}
        running = uids | self._kubelet.uids() if self._former and self._kubelet else uids
        for mirror, statics in list(self._former.items()):
            if running.isdisjoint(statics):
                del self._former[mirror]
            else:
                uids.add(mirror)
        return frozenset(uids)

    def _on_event(self, old: tuple[str, ...] | None, new: tuple[str, ...] | None) -> None:
        if old is None or new is not None:
            return
        uid, *statics = old
        if statics:
            self._former[uid] = frozenset(statics)
        self._on_gone()


@dataclass(frozen=True, slots=True)
class KubeletPods:
    """The pods in kubelet's directory, which has one subdirectory per pod; by default /var/lib/kubelet/pods.

    ``own_uid``: the uid of the agent's pod. Both methods raise MustStay if the directory is not reliable.
    """

    path: Path
    own_uid: str | None = None

    def uids(self) -> frozenset[str]:
        """Return the names of the subdirectories in kubelet's directory. Each name is the uid of a pod."""
        try:
            found = frozenset(os.listdir(self.path))  # noqa: PTH208  # Only the names are needed, not Path objects.
        except OSError as error:
            raise _unknown(self.path, error) from error
        # If the agent's own pod is missing, this is not the directory of this node's kubelet. The mount may be wrong.
        if self.own_uid is not None and self.own_uid not in found:
            raise MustStay(KeepReason.KUBELET_UNKNOWN, f"{self.path} does not include the agent's own pod")
        return found

    def check_gone(self, uid: str) -> None:
        """Raise MustStay if kubelet still has a directory of the pod with this uid."""
        try:
            (self.path / uid).lstat()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self.path.is_dir():
                return
            raise _unknown(self.path, error) from error
        raise MustStay(KeepReason.KUBELET)


def _unknown(path: Path, error: OSError) -> MustStay:
    return MustStay(KeepReason.KUBELET_UNKNOWN, f"{path}: {error.strerror}")


HOW = "kubectl get pods --all-namespaces -o json"


class PodsFile(msgspec.Struct, frozen=True):
    """The uids of the pods in a file. ``warning``: why pods may be missing in the file, or None."""

    uids: frozenset[str]
    warning: str | None = None


def read_pods(text: bytes, node: str | None) -> PodsFile:
    """Return the pods of all nodes in ``text``, a list of pods in JSON.

    ``node``: the node that must have at least one of the pods; None if --complete confirms that the file has all pods.

    Raises BadInput if the text is not a complete list of pods, or has no pod on ``node``.
    """
    listed = _decode(text)
    uids = frozenset(uid for pod in listed.items for uid in pod.uids())
    if node is None:
        return PodsFile(uids)
    if not any(pod.spec.node_name == node for pod in listed.items):
        raise errors.BadInput(
            f"No pod in the file is on node {node!r}. Check the node's name, and that the file has the pods of all "
            f"namespaces ({HOW}). If no pod is on the node, add --complete."
        )
    namespace, *others = {pod.metadata.namespace for pod in listed.items}
    if others:
        return PodsFile(uids)
    warning = f"all pods in the file are in namespace {namespace!r}; the pods of all namespaces are required ({HOW})"
    return PodsFile(uids, warning)


def _decode(text: bytes) -> _PodList:
    try:
        listed = Decoder(_PodList).decode(text)
    except k8s_types.UNDECODABLE as error:
        raise errors.BadInput(
            f"The file must be a complete list of pods in JSON: {error}. Create it with: {HOW}"
        ) from error
    if listed.kind not in ("List", "PodList") or any(pod.kind != "Pod" for pod in listed.items):
        raise errors.BadInput(
            f"The file must be a complete list of pods; got kind {listed.kind}. Create it with: {HOW}"
        )
    if listed.metadata.continue_ or listed.metadata.remaining_item_count:
        raise errors.BadInput(f"The file has only one page of a list of pods. Create it with: {HOW}")
    return listed
