"""The webhook's work apart from HTTP: takes a review's bytes, gives its answer, counts and logs it."""

from __future__ import annotations

import threading
import time
from http import HTTPStatus

import msgspec
import structlog

from vcuda.errors import Unavailable, UnreadableLedger
from vcuda.k8s_types import UNDECODABLE, AdmissionRequest, AdmissionResponse, ObjectMeta, read_review, write_review
from vcuda.kube import QuotaPlace
from webhook.choices import RecentChoices
from webhook.context import PolicySource
from webhook.ledgers import Ledgers
from webhook.metrics import Metrics
from webhook.mutate import mutate
from webhook.pod_review import vcuda_pod_of
from webhook.quota_edit import check_edit
from webhook.validate import validate

QUIET = frozenset({"ignored", "unlimited", "mirror"})
"""Outcomes of pods that are none of the quota's business: counted, and logged at debug level only."""

MARGIN = 0.5
"""Seconds kept back from the API server's timeout, so that the answer is there before it gives up."""


class NotReady(Unavailable):
    """The quota has not been read yet, or the server is about to stop: another replica, or a later try, answers."""


class Gate:
    """Whether this replica takes work: it stops in two steps, so that no request is lost."""

    def __init__(self) -> None:
        self._leaving = threading.Event()
        self._closed = threading.Event()

    @property
    def leaving(self) -> bool:
        """Whether readiness fails, while requests are still answered."""
        return self._leaving.is_set()

    @property
    def closed(self) -> bool:
        """Whether late requests are sent elsewhere."""
        return self._closed.is_set()

    def leave(self) -> None:
        """Fail readiness from now on."""
        self._leaving.set()

    def close(self) -> None:
        """Send every further request elsewhere."""
        self._leaving.set()
        self._closed.set()


class _Named(msgspec.Struct):
    metadata: ObjectMeta = ObjectMeta()


_NAMED = msgspec.json.Decoder(_Named)


class Service(msgspec.Struct, frozen=True):
    """Everything a review is answered from."""

    policy: PolicySource
    ledgers: Ledgers
    metrics: Metrics
    gate: Gate
    log: structlog.typing.FilteringBoundLogger
    place: QuotaPlace = QuotaPlace()
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)

    @property
    def ready(self) -> bool:
        """Whether the quota has been read and the replica is not about to stop."""
        return not self.gate.leaving and self.policy.current() is not None

    async def answer(self, path: str, body: bytes, timeout: float) -> bytes:
        """Return the review that answers the one in ``body``; ``timeout`` is the API server's, in seconds.

        Raises:
            BadReview: the body is no review this server answers.
            Unavailable: it cannot be answered now; nothing is allowed because something failed.

        """
        started = time.perf_counter()
        if self.gate.closed:
            raise NotReady("this replica is stopping")
        request = read_review(body)
        answer = await self._decide(path, request, timeout)
        reply = write_review(request.uid, answer)
        seconds = time.perf_counter() - started
        self.metrics.observe(path, answer, seconds)
        self._log(path, request, answer, seconds)
        return reply

    async def _decide(self, path: str, request: AdmissionRequest, timeout: float) -> AdmissionResponse:
        if path == "/quota":
            # Without a quota in force too: this is how a broken one is mended.
            return await check_edit(request, self.place, self.policy.current(), self.ledgers)
        policy = self.policy.current()
        if policy is None:
            return _without_policy(request)
        try:
            if path == "/mutate":
                return await mutate(request, policy, self.ledgers, self.choices)
            deadline = time.monotonic() + max(timeout - MARGIN, MARGIN)
            return await validate(request, policy, self.ledgers, self.choices, deadline)
        except UnreadableLedger as error:
            # An answer, not an HTTP error: that the API server would ignore, and then refuse the pod as not pinned.
            return AdmissionResponse("unreadable-ledger", False, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _log(self, path: str, request: AdmissionRequest, answer: AdmissionResponse, seconds: float) -> None:
        """Write the one line that tells what became of a request."""
        if answer.outcome in QUIET:
            self.log.debug("admission", path=path, uid=request.uid, outcome=answer.outcome)
            return
        self.log.info(
            "admission",
            path=path,
            uid=request.uid,
            namespace=request.namespace,
            pod=request.name or _generated(request),
            model=answer.model,
            scheme=answer.scheme,
            outcome=answer.outcome,
            allowed=answer.allowed,
            message=answer.message or answer.reason,
            dry_run=bool(request.dry_run),
            ms=round(seconds * 1000, 3),
        )


def _without_policy(request: AdmissionRequest) -> AdmissionResponse:
    """Let pods pass that are none of the quota's business, whatever it says; the others have to wait for it."""
    pod = vcuda_pod_of(request)
    if isinstance(pod, AdmissionResponse):
        return pod
    raise NotReady("the quota has not been read yet")


def _generated(request: AdmissionRequest) -> str:
    """Return how a pod will be named that has no name yet, as in /mutate under generateName; nothing if unreadable."""
    try:
        metadata = _NAMED.decode(request.object).metadata
    except UNDECODABLE:
        return ""
    return metadata.name or f"{metadata.generate_name}*"
