"""Finds out which pods exist on a node, from the API server and from kubelet's directory of pods.

A directory may be deleted only if both sources are reliable and neither has the pod. kubelet removes its own directory
of a pod only after the pod's containers have ended and its volumes are unmounted (cleanupOrphanedPodDirs in
pkg/kubelet/kubelet_volumes.go). So kubelet's directory protects a running pod even if the API lacks the pod.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from controller.garbage.node.names import Keep, KeepReason, MustStay
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube

PODS = "/api/v1/pods"

MAX_UID_LENGTH = 64
"""Longer uids in mirror pods' annotations are ignored, to save memory. Valid uids have 32 or 36 characters."""

_CONFIRMED_FOR = 5.0  # Seconds for which a LIST of pods is reused, so that a thousand directories need few LISTs.

# Tenants cannot create pods in this namespace. So only here a mirror pod shows reliably what its static pod requests.
_TRUSTED_NAMESPACE = "kube-system"


class _NodeResources(msgspec.Struct, frozen=True, gc=False):
    limits: Mapping[str, Any] | None = None


class _NodeContainer(msgspec.Struct, frozen=True, gc=False):
    resources: _NodeResources = _NodeResources()


class _PodMeta(msgspec.Struct, frozen=True, gc=False):
    uid: str  # `uid` has no default value, so a pod without a uid cannot be decoded.
    namespace: str = ""
    annotations: Mapping[str, str] | None = None


class _NodePodSpec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    containers: tuple[_NodeContainer, ...] = ()
    init_containers: tuple[_NodeContainer, ...] | None = None


class _NodePod(msgspec.Struct, frozen=True, gc=False):
    metadata: _PodMeta
    spec: _NodePodSpec = _NodePodSpec()

    def static_uid(self) -> str | None:
        """Return the uid of the static pod; None unless this is a mirror pod."""
        # kubelet sets this annotation on a mirror pod (pkg/kubelet/types).
        uid = (self.metadata.annotations or {}).get(k8s_types.MIRROR_ANNOTATION)
        return uid if uid and len(uid) <= MAX_UID_LENGTH else None

    def may_have_cards(self) -> bool:
        """True for a mirror pod whose static pod may have cards."""
        # A card needs a limit with a slash in its name, because resources of device plugins have such names.
        containers = (*self.spec.containers, *(self.spec.init_containers or ()))
        limits = (name for container in containers for name in container.resources.limits or ())
        return self.metadata.namespace != _TRUSTED_NAMESPACE or any("/" in name for name in limits)


class PodListing(msgspec.Struct, frozen=True):
    """One complete list of the node's pods.

    ``uids``: the uids of the pods in any phase. A mirror pod has another uid than its static pod.
    ``statics``: for each uid of a static pod in a mirror pod's annotation, whether the static pod may have cards.
    """

    uids: frozenset[str] = frozenset()
    statics: Mapping[str, bool] = {}

    @classmethod
    def of(cls, pods: Iterable[_NodePod]) -> "PodListing":
        uids, statics = set(), dict[str, bool]()
        for pod in pods:
            uids.add(pod.metadata.uid)
            if static := pod.static_uid():
                statics[static] = statics.get(static, False) or pod.may_have_cards()
        return cls(frozenset(uids), statics)

    def may_have_cards(self, uid: str) -> bool:
        """True if ``uid`` in kubelet's directory is a static pod that may have cards."""
        # A pod that is not in the list is a static pod, or a deleted pod that kubelet has not removed yet. The uid of a
        # static pod has no hyphens, unless its manifest sets a uid. A static pod may run without a mirror pod.
        return self.statics.get(uid, "-" not in uid)


class Presence(msgspec.Struct, frozen=True):
    """The pods that exist on this node.

    ``pods``: the uids of the pods in the API, in any phase.
    ``kubelet``: the uids in kubelet's directory of pods.
    ``static``: the uid of a static pod that may have cards, or None.
    """

    pods: frozenset[str] = frozenset()
    kubelet: frozenset[str] = frozenset()
    static: str | None = None

    def keep(self, uid: str) -> Keep | None:
        """Return why the directory of the pod with this uid must be kept; None if the pod does not exist."""
        if uid in self.pods:
            return Keep(KeepReason.POD)
        if uid in self.kubelet:
            return Keep(KeepReason.KUBELET)
        # A device plugin that finds a static pod in the API names the directory after the mirror pod. If the mirror pod
        # is deleted, kubelet creates another with a new uid. The static pod still uses the directory with the old uid.
        if self.static and "-" in uid:
            return Keep(KeepReason.STATIC, self.static)
        return None


PodSource = Callable[[bool], PodListing]
"""Lists the node's pods. If the argument is True, the list is consistent, and at most a few seconds old. Raises
VcudaError if the API server does not answer, or any pod cannot be read."""

_POD = Decoder(_NodePod)


def list_pods(kube: Kube, node: str, version: str = "") -> PodListing:
    """Return the pods of the node by one LIST. Raises VcudaError if any pod cannot be read.

    ``version``: the oldest allowed resourceVersion. "" is a consistent LIST, as new as etcd. "0" is any version, which
    the API server has in its cache.
    """
    # The pages of a LIST show one version (Kubernetes API concepts, "Retrieving large results sets in chunks"). So no
    # pod that was bound to the node before this version is missing.
    params = {"fieldSelector": f"spec.nodeName={node}", **({"resourceVersion": version} if version else {})}
    try:
        pages = kube.list_pages(PODS, params)
        return PodListing.of(_POD.decode(raw) for page in pages for raw in page.items)
    except k8s_types.UNDECODABLE as error:
        raise errors.Unavailable(f"GET {PODS} returned a pod that cannot be read: {error}") from error


class ApiPods:
    """Lists the node's pods from the API server. ``clock``: returns the time of a monotonic clock, in seconds."""

    def __init__(self, kube: Kube, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._node = node
        self._clock = clock
        self._made = -math.inf
        self._live = PodListing()

    def __call__(self, live: bool) -> PodListing:
        if not live:
            # Forget the last consistent list: directories that are found from now on may be of newer pods.
            self._made = -math.inf
            # Before Kubernetes 1.34, each consistent LIST in pages reads all pods of the cluster from etcd.
            try:
                return list_pods(self._kube, self._node, "0")
            except errors.TooLarge:  # The API server sends a LIST from its cache in one page of any size.
                return list_pods(self._kube, self._node)
        began = self._clock()
        if began - self._made > _CONFIRMED_FOR:
            self._live = list_pods(self._kube, self._node)
            self._made = began
        return self._live


@dataclass(frozen=True, slots=True)
class Evidence:
    """Reads both sources of the pods that exist on this node.

    ``kubelet``: kubelet's directory of pods, which has one subdirectory per pod; by default /var/lib/kubelet/pods.
    ``own_uid``: the uid of the agent's own pod.
    """

    source: PodSource
    kubelet: Path
    own_uid: str

    def read(self, *, live: bool = False) -> Presence:
        """Return the pods that exist now. Raises VcudaError if one of the sources is not reliable.

        A source without the agent's own pod is incomplete, or belongs to another node or cluster.
        """
        listing = self.source(live)
        if self.own_uid not in listing.uids:
            raise MustStay(KeepReason.PODS_UNKNOWN, "the list of pods does not include the agent's own pod")
        try:
            kubelet = frozenset(os.listdir(self.kubelet))  # noqa: PTH208  # Only the names are needed, not Path objects.
        except OSError as error:
            raise MustStay(KeepReason.KUBELET_UNKNOWN, f"{self.kubelet}: {error.strerror}") from error
        if self.own_uid not in kubelet:
            raise MustStay(KeepReason.KUBELET_UNKNOWN, f"{self.kubelet} does not include the agent's own pod")
        static = min(filter(listing.may_have_cards, kubelet - listing.uids), default=None)
        return Presence(listing.uids, kubelet, static)
