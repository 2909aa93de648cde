"""How something stale is taken from an object: by a patch that only the very version that was judged lets in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, TypeVar

import msgspec
import structlog

from controller.metrics import GarbageMetrics
from vcuda.errors import ApiError, Conflict, VcudaError
from vcuda.kube import JSON_PATCH, Event, Kube, Subject, post_event
from vcuda.stale import Removal, removal_patch

COMPONENT = "vcuda-controller"
REASON = "StaleAllocationRemoved"

TRIES = 5
"""How often an object is judged anew when somebody else writes it first."""

T = TypeVar("T")


class Found(msgspec.Struct, frozen=True):
    """What is stale on the object at ``path``; ``subject`` has the version that was judged."""

    subject: Subject
    path: str
    removals: tuple[Removal, ...]


class Sweep(Protocol):
    """What becomes of what is found."""

    def remove(self, found: Found) -> None:
        """Take it away. Raises Conflict where the object has changed since it was judged."""


class Removing:
    """Removes what is found; each removal is a log line, a count, and an Event on the object.

    The Event comes after, so that it is never untrue; who crashes in between leaves none.
    """

    def __init__(self, kube: Kube, metrics: GarbageMetrics) -> None:
        self._kube = kube
        self._metrics = metrics
        self._log = structlog.get_logger()

    def remove(self, found: Found) -> None:
        """Patch the object, and tell; see `Sweep`. Raises what `vcuda.kube.Kube.patch` does."""
        try:
            self._kube.patch(found.path, removal_patch(found.subject.resource_version, found.removals), JSON_PATCH)
        except ApiError as error:
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:  # the patch's own test has failed
                raise Conflict(error.status, error.reason) from error
            raise
        for removal in found.removals:
            self._metrics.removed(removal.scheme, removal.rule)
            self._log.info("stale allocation removed", **_fields(found, removal))
            self._tell(found.subject, removal)

    def _tell(self, subject: Subject, removal: Removal) -> None:
        identity = f"{removal.scheme}-{removal.rule}-{subject.resource_version}"
        message = f"removed the allocation of {removal.scheme}: {removal.why} ({', '.join(_keys(removal))})"
        try:
            post_event(self._kube, Event(subject, identity, REASON, message, COMPONENT))
        except VcudaError as error:
            self._log.warning("event not written", object=subject.name, error=str(error))


class Reporting:
    """Writes nothing but the log."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def remove(self, found: Found) -> None:
        """Log what would be removed."""
        for removal in found.removals:
            self._log.info("stale allocation found; a dry run removes nothing", **_fields(found, removal))


def retried(attempt: Callable[[], T]) -> T:
    """Return what an attempt returns, made anew while it meets a Conflict; the last one may raise it."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Conflict):
            return attempt()
    return attempt()


def _fields(found: Found, removal: Removal) -> dict[str, object]:
    subject = found.subject
    about = {"kind": subject.kind, "namespace": subject.namespace, "name": subject.name, "uid": subject.uid}
    return {**about, "scheme": removal.scheme, "rule": removal.rule, "why": removal.why, "keys": _keys(removal)}


def _keys(removal: Removal) -> tuple[str, ...]:
    return (*removal.annotations, *removal.labels)
