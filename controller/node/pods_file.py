"""Pods from a file, as ``kubectl get pods -A -o json`` writes them. What may not be all of them is refused."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vcuda.errors import BadInput
from vcuda.objects import UNDECODABLE
from vcuda.vm_directories import present_uids

HOW = "kubectl get pods --all-namespaces -o json"


class _Meta(msgspec.Struct, frozen=True):
    uid: str
    namespace: str = ""
    annotations: Mapping[str, str] | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Meta
    kind: str = "Pod"
    spec: _Spec = _Spec()


class _ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    continue_: str = msgspec.field(name="continue", default="")
    remaining_item_count: int | None = None


class _List(msgspec.Struct, frozen=True):
    kind: str
    items: list[_Pod]
    metadata: _ListMeta = _ListMeta()


class PodsFile(msgspec.Struct, frozen=True):
    """``uids`` of all pods in the file, of mirror pods the static pods' too; ``warning``: it may not hold them all."""

    uids: frozenset[str]
    warning: str | None = None


def read_pods(text: bytes, node: str) -> PodsFile:
    """Read a list of pods. A uid counts as present whatever node its pod is on.

    Raises BadInput where it is no whole list of pods, or one without a pod on ``node``.
    """
    listed = _decode(text)
    if not any(pod.spec.node_name == node for pod in listed.items):
        raise BadInput(
            f"No pod in it is on node {node!r}. Is that the node's name, and does the file hold the pods of all "
            f"namespaces? ({HOW}) If the node really has none, say so with --complete."
        )
    return PodsFile(_uids(listed), _warning(listed))


def read_complete_pods(text: bytes) -> PodsFile:
    """Read a list of pods that somebody vouches for: it may hold none of the node."""
    listed = _decode(text)
    return PodsFile(_uids(listed))


def _decode(text: bytes) -> _List:
    try:
        listed = msgspec.json.decode(text, type=_List)
    except UNDECODABLE as error:
        raise BadInput(f"This is no list of pods in JSON, or not a whole one: {error}. Write it with: {HOW}") from error
    if listed.kind not in ("List", "PodList") or any(pod.kind != "Pod" for pod in listed.items):
        raise BadInput(f"This is no list of pods (kind: {listed.kind}). Write it with: {HOW}")
    if listed.metadata.continue_ or listed.metadata.remaining_item_count:
        raise BadInput(f"This is one page of a list, and more pods follow it. Write the file with: {HOW}")
    return listed


def _uids(listed: _List) -> frozenset[str]:
    return frozenset(uid for pod in listed.items for uid in present_uids(pod.metadata.uid, pod.metadata.annotations))


def _warning(listed: _List) -> str | None:
    namespaces = {pod.metadata.namespace for pod in listed.items}
    if len(namespaces) != 1:
        return None
    return f"all pods in the file are of namespace {min(namespaces)!r}; it has to hold those of all namespaces ({HOW})"
