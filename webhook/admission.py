"""Answers reviews, apart from HTTP: decodes a review, routes it to `webhook.review`, encodes, counts and logs the
answer."""

import functools
import time
from http import HTTPStatus

import msgspec
import structlog

from vcuda import errors, k8s_types, kube
from vcuda.admission_review import AdmissionRequest, AdmissionResponse, read_review, write_review
from vcuda.claims.names import GROUP
from webhook.intake.bodies import MAX_BODY, ReviewHead
from webhook.intake.large_reviews import PLACES, QUOTA_PLACES, ReviewThread
from webhook.ledger.ledgers import Ledgers, RecentChoices, ReviewDeadline
from webhook.metrics import Metrics
from webhook.review import claim_review, context, pod_review, quota_edit
from webhook.review.verdicts import Creation

QUIET = frozenset({"ignored", "unlimited", "mirror"})
"""Outcomes of pods that no quota concerns. They are counted, and logged only at debug level."""

# A review of this size blocks the event loop for 1 to 5 ms, by the machine and its load (`python -m bench large-pods`).
# Usual reviews have 4 to 20 KiB. Passing one of these to a thread would take about as long as answering it.
LARGE_REVIEW = 64 * 1024

TOO_LARGE = (
    f"the API server sends this object to this webhook in more than {MAX_BODY} bytes ({MAX_BODY // 2**20} MiB): "
    "each &, < and > counts as six bytes, and an update contains the old object too; "
    "make it smaller, for example by moving long texts to a ConfigMap"
)
"""The message of a review that is over `MAX_BODY`."""


class NotReady(errors.Unavailable):
    """The quota has not been read yet, or the server is about to stop. Another replica or a retry will get an
    answer."""


class Gate(msgspec.Struct):
    """Whether this replica takes requests: first readiness fails (``leaving``), then they get a 503 (``closed``)."""

    leaving: bool = False
    closed: bool = False

    def leave(self) -> None:
        self.leaving = True

    def close(self) -> None:
        self.leaving = self.closed = True


class Service(msgspec.Struct, frozen=True):
    """Answers reviews from the policy and the ledgers."""

    policy: context.PolicySource
    ledgers: Ledgers
    metrics: Metrics
    gate: Gate
    log: structlog.typing.FilteringBoundLogger
    place: kube.QuotaPlace = kube.QuotaPlace()
    namespaces: quota_edit.NamespaceNames | None = None
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    large_reviews: ReviewThread = msgspec.field(default_factory=lambda: ReviewThread("large-review", PLACES))
    quota_edits: ReviewThread = msgspec.field(default_factory=lambda: ReviewThread("quota-edit", QUOTA_PLACES))

    @property
    def ready(self) -> bool:
        """Whether the quota has been read and the replica is not about to stop."""
        return not self.gate.leaving and self.policy() is not None

    @property
    def waiting(self) -> int:
        return self.large_reviews.waiting + self.quota_edits.waiting

    def thread_for(self, path: str, size: int) -> ReviewThread | None:
        """Return the thread that decides reviews of this path and size; None if the event loop decides them."""
        # A document of a few hundred KiB takes PyYAML seconds.
        if path == "/quota":
            return self.quota_edits
        return self.large_reviews if size > LARGE_REVIEW else None

    async def answer(self, path: str, body: bytes, deadline: ReviewDeadline, line: str = "") -> bytes:
        """Return the answer to the review in ``body``, which waits in a ``line`` if it is large.

        Raises BadReview if the body is no review, and Unavailable if it cannot be answered now.
        """
        started = time.perf_counter()
        if self.gate.closed:
            raise NotReady("this replica is stopping")
        thread = self.thread_for(path, len(body))
        if thread is None:
            return await self._answer(path, body, started, deadline, self.ledgers)
        work = functools.partial(self._answer, path, body, started, deadline)
        return await thread.run(work, self.ledgers, line, deadline)

    def reject_too_large(self, path: str, head: ReviewHead) -> bytes:
        """Return the denial of a review that is over `MAX_BODY`. Only its first bytes have been read."""
        response = AdmissionResponse("too-large", False, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, TOO_LARGE)
        self.metrics.observe(path, response, 0)
        self.log.info("admission", path=path, uid=head.uid, namespace=head.namespace, outcome=response.outcome)
        return write_review(head.uid, response)

    async def _answer(
        self, path: str, body: bytes, started: float, deadline: ReviewDeadline, ledgers: Ledgers
    ) -> bytes:
        deadline.check()
        request = read_review(body)
        deadline.check()
        response = await self._decide(path, request, deadline, ledgers)
        reply = write_review(request.uid, response, deadline.check)
        seconds = time.perf_counter() - started
        self.metrics.observe(path, response, seconds)
        self._log(path, request, response, seconds)
        return reply

    async def _decide(
        self, path: str, request: AdmissionRequest, deadline: ReviewDeadline, ledgers: Ledgers
    ) -> AdmissionResponse:
        policy = self.policy()
        if path == "/quota":
            # This works without a quota in force too, so that a malformed one can be corrected.
            return await quota_edit.check_edit(
                request, self.place, policy, ledgers, namespaces=self.namespaces, check=deadline.check
            )
        is_claim = request.kind.group == GROUP
        if policy is None:
            # Pods without GPUs are admitted all the same: a starting webhook must not stop a cluster.
            # Any resource with a domain may be a unit, so a pod with such a resource must be retried.
            pod = None if is_claim else pod_review.gpu_pod_of(request)
            if isinstance(pod, AdmissionResponse):
                return pod
            raise NotReady("the quota has not been read yet")
        if path == "/mutate":
            decide = claim_review.mutate if is_claim else pod_review.mutate
        else:
            decide = claim_review.validate if is_claim else pod_review.validate
        try:
            return await decide(Creation(request, policy, ledgers, self.choices, deadline))
        except (errors.UnreadableLedger, errors.LedgerLost) as error:
            # There is no retryAfterSeconds, because a controller would sleep for it in one of its few workers.
            return _without_ledger(error, HTTPStatus.FORBIDDEN if is_claim else HTTPStatus.TOO_MANY_REQUESTS)

    def _log(self, path: str, request: AdmissionRequest, response: AdmissionResponse, seconds: float) -> None:
        if response.outcome in QUIET:
            self.log.debug("admission", path=path, uid=request.uid, outcome=response.outcome)
            return
        self.log.info(
            "admission",
            path=path,
            uid=request.uid,
            namespace=request.namespace,
            pod=request.name or _generated_name(request),
            model=response.model,
            scheme=response.scheme,
            outcome=response.outcome,
            allowed=response.allowed,
            message=response.message or response.reason,
            dry_run=bool(request.dry_run),
            ms=round(seconds * 1000, 3),
        )


def _without_ledger(error: errors.UnreadableLedger | errors.LedgerLost, while_lost: HTTPStatus) -> AdmissionResponse:
    # This is an answer and not an HTTP error. The API server would ignore an error of /mutate, and the pod would then
    # be rejected as not pinned.
    if isinstance(error, errors.LedgerLost):
        return AdmissionResponse("ledger-lost", False, while_lost, str(error))
    return AdmissionResponse("unreadable-ledger", False, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def _generated_name(request: AdmissionRequest) -> str:
    # At /mutate a pod with generateName has no name yet, nor has its request.
    try:
        named = msgspec.json.decode(request.object, type=_Named).metadata
    except k8s_types.UNDECODABLE:
        return ""
    return named.name or f"{named.generate_name}*"


class _PodNames(k8s_types.K8sStruct, frozen=True):
    name: str = ""
    generate_name: str = ""


class _Named(k8s_types.K8sStruct, frozen=True):
    """Only the names are decoded, because the annotations of a large pod take longest."""

    metadata: _PodNames = _PodNames()
