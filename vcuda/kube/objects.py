"""Decodes the objects of LISTs, and reads the names of namespaces, all pods and the registration of the webhooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from vcuda import errors, k8s_types, registration
from vcuda.k8s_types import Decoder
from vcuda.kube.client import Kube, segment
from vcuda.kube.pages import Page, name_in

T = TypeVar("T")


def decode_each(decoder: Decoder[T], items: Iterable[bytes | msgspec.Raw]) -> Iterator[T]:
    """Yield the decoded objects of a list. An object that cannot be decoded is logged and left out."""
    for raw in items:
        try:
            yield decoder.decode(raw)
        except k8s_types.UNDECODABLE as error:
            name = str(name_in(bytes(raw)))
            structlog.get_logger().warning("object left out", object=name, error=type(error).__name__)


def decode_all(decode: Callable[[msgspec.Raw], T], pages: Iterable[Page]) -> Iterator[T]:
    """Yield the decoded objects of a LIST. Raises Unavailable with the name of an object that cannot be decoded."""
    for raw in (raw for page in pages for raw in page.items):
        try:
            yield decode(raw)
        except k8s_types.UNDECODABLE as error:
            raise errors.Unavailable(f"{name_in(bytes(raw))} cannot be decoded; it may have to be deleted") from error


_NAMESPACE = Decoder(k8s_types.K8sObject)


def namespace_names(kube: Kube, seconds: float) -> frozenset[str]:
    """Return the names of all namespaces. Raises Unavailable, or ListOverdue after ``seconds``."""
    pages = kube.list_pages("/api/v1/namespaces", timeout=seconds, seconds=seconds)
    return frozenset(each.metadata.name for page in pages for each in decode_each(_NAMESPACE, page.items))


_POD = Decoder(k8s_types.Pod)


def living_pods(kube: Kube, seconds: float) -> Iterator[k8s_types.Pod]:
    """Yield all pods that have not ended. Raises Unavailable, or ListOverdue after ``seconds``."""
    living = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    pages = kube.list_pages("/api/v1/pods", living, timeout=seconds, seconds=seconds, skip=lambda _too_large: None)
    return (pod for page in pages for pod in decode_each(_POD, page.items))


def missing_registration(kube: Kube) -> Sequence[registration.MissingObject]:
    """Return the webhooks and policies of the manifests that the API server lacks or has changed. Raises VcudaError."""

    def get(kind: str, name: str) -> dict[str, Any] | None:
        path = f"/apis/admissionregistration.k8s.io/v1/{registration.RESOURCES[kind]}/{segment(name)}"
        try:
            found: dict[str, Any] = msgspec.json.decode(kube.get(path))
        except errors.NotFound:
            return None
        return found

    return registration.find_missing(get)
