"""Where it is known from which pods exist on a node."""

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
from vcuda.kube import Kube, Reflector

PODS = "/api/v1/pods"

# What nothing has confirmed for so many seconds, not even a bookmark (about one a minute), is old (see Reflector).
FRESH_SECONDS = 120.0

_CONFIRMED_FOR = 5.0  # seconds for which one list serves, so that a thousand directories do not cost a thousand


class PodSource(Protocol):
    """Both methods raise MustStay where it is not known which pods exist, and VcudaError where nobody could say."""

    def known(self) -> frozenset[str]:
        """Return the uids of the pods on the node, whatever their phase; of mirror pods the static pods' too."""

    def confirmed(self) -> frozenset[str]:
        """Return the same, asked anew."""


class _PodMeta(msgspec.Struct, frozen=True, gc=False):
    uid: str  # required: a pod that shows none cannot be told from the others, so it is one that cannot be read
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


_POD = msgspec.json.Decoder(_NodePod)


def read_uids(raw: bytes) -> tuple[str, ...]:
    """Return the uids of one pod in JSON; one of UNDECODABLE where it has none that can be read."""
    return _POD.decode(raw).uids()


def on_node(node: str) -> dict[str, str | int]:
    """Return the parameters of a request for a node's pods."""
    return {"fieldSelector": f"spec.nodeName={node}"}


def list_uids(kube: Kube, node: str, page_size: int = 500) -> frozenset[str]:
    """Return the uids of the node's pods by a consistent LIST. VcudaError where it is not whole to the last pod."""
    # A LIST without resourceVersion is served from a quorum of etcd, and its pages all show one version (Kubernetes API
    # concepts, "Retrieving large results sets in chunks"): a pod that is bound to the node before is in it.
    found: set[str] = set()
    try:
        for page in kube.list_pages(PODS, on_node(node), page_size):
            for raw in page.items:
                found.update(read_uids(raw))
    except k8s_types.UNDECODABLE as error:
        raise errors.Unavailable(f"GET {PODS}: a pod that cannot be read: {error}") from error
    return frozenset(found)


def validate_listing(uids: frozenset[str], own_uid: str | None) -> frozenset[str]:
    """Return the uids; MustStay where they cannot be all of this node's.

    ``own_uid`` is of the pod that this process runs in: a list without it is of another node or cluster, or not whole.
    """
    if own_uid is not None and own_uid not in uids:
        raise MustStay(KeepReason.PODS_UNKNOWN, "the list of this node's pods lacks the one that asks")
    if not uids:  # without a uid of our own this is all that can be told
        raise MustStay(KeepReason.PODS_UNKNOWN, "the list of this node's pods is empty")
    return uids


class RecentPodList:
    """A list of the node's pods that is made anew when it is some seconds old. ``clock`` is in steady seconds."""

    def __init__(self, kube: Kube, node: str, own_uid: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._node = node
        self._own_uid = own_uid
        self._clock = clock
        self._made = -math.inf
        self._uids: frozenset[str] = frozenset()

    def known(self) -> frozenset[str]:
        """Return the uids. MustStay where they cannot be all of this node's, VcudaError where none could be had."""
        began = self._clock()
        if began - self._made > _CONFIRMED_FOR:
            self._uids = validate_listing(list_uids(self._kube, self._node), self._own_uid)
            self._made = began
        return self._uids

    confirmed = known


@dataclass(frozen=True, slots=True)
class FixedPods:
    """Pods that somebody else has listed."""

    uids: frozenset[str]

    def known(self) -> frozenset[str]:
        """Return them."""
        return self.uids

    confirmed = known


class WatchedPods:
    """The node's pods, watched, and listed to confirm; ``on_gone`` is called when one has left the API."""

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
        """Return what the watch knows; MustStay before the first complete list, and when it is not heard any more."""
        if not self.reflector.synced.is_set():
            raise MustStay(KeepReason.PODS_UNKNOWN, "the first list is not complete")
        age = self.reflector.last_event_age(time.monotonic())
        if age > FRESH_SECONDS or not self.reflector.alive:
            raise MustStay(KeepReason.PODS_UNKNOWN, "the API server is not heard")
        return validate_listing(self._with_former_mirrors(), self._own_uid)

    def confirmed(self) -> frozenset[str]:
        """Return a list that is at most a few seconds old."""
        return self._listing.known()

    def _with_former_mirrors(self) -> frozenset[str]:
        # Add the mirror pods that are gone while their static pod is not: kubelet makes another, with another uid. What
        # was made for the static pod by the uid of its first mirror serves it as long as it runs. Only mirrors that
        # went before our eyes are known; of others the mounts of the static pod's containers tell, with hostPID.
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
    """kubelet's directory of pods, /var/lib/kubelet/pods by default.

    ``own_uid`` is of the pod that looks into it. Both methods raise MustStay where it is not known what kubelet keeps.
    """

    path: Path
    own_uid: str | None = None

    def uids(self) -> frozenset[str]:
        """Return the uids that it keeps: the names in the directory."""
        try:
            found = frozenset(os.listdir(self.path))  # noqa: PTH208  # names are wanted, not paths
        except OSError as error:
            raise _unknown(self.path, error) from error
        # Without us it is not this node's: a mount that leads somewhere else would tell that all pods are gone.
        if self.own_uid is not None and self.own_uid not in found:
            raise MustStay(KeepReason.KUBELET_UNKNOWN, f"{self.path} lacks the pod that looks into it")
        return found

    def check_gone(self, uid: str) -> None:
        """Look for one pod anew; MustStay where kubelet keeps it."""
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
    """``uids`` of all pods in the file, of mirror pods the static pods' too; ``warning``: it may not hold them all."""

    uids: frozenset[str]
    warning: str | None = None


def read_pods(text: bytes, node: str | None) -> PodsFile:
    """Read a list of pods. A uid counts as present whatever node its pod is on.

    Raises BadInput where it is no whole list of pods, or one without a pod on ``node``; None: somebody vouches for it.
    """
    listed = _decode(text)
    uids = frozenset(uid for pod in listed.items for uid in pod.uids())
    if node is None:
        return PodsFile(uids)
    if not any(pod.spec.node_name == node for pod in listed.items):
        raise errors.BadInput(
            f"No pod in it is on node {node!r}. Is that the node's name, and does the file hold the pods of all "
            f"namespaces? ({HOW}) If the node really has none, say so with --complete."
        )
    namespace, *others = {pod.metadata.namespace for pod in listed.items}
    if others:
        return PodsFile(uids)
    warning = f"all pods in the file are of namespace {namespace!r}; it has to hold those of all namespaces ({HOW})"
    return PodsFile(uids, warning)


def _decode(text: bytes) -> _PodList:
    try:
        listed = msgspec.json.decode(text, type=_PodList)
    except k8s_types.UNDECODABLE as error:
        raise errors.BadInput(
            f"This is no list of pods in JSON, or not a whole one: {error}. Write it with: {HOW}"
        ) from error
    if listed.kind not in ("List", "PodList") or any(pod.kind != "Pod" for pod in listed.items):
        raise errors.BadInput(f"This is no list of pods (kind: {listed.kind}). Write it with: {HOW}")
    if listed.metadata.continue_ or listed.metadata.remaining_item_count:
        raise errors.BadInput(f"This is one page of a list, and more pods follow it. Write the file with: {HOW}")
    return listed
