"""Decodes admission reviews, and encodes, counts and logs the answers.

`webhook.review` decides each review. `webhook.server` handles HTTP.
"""

import functools
import math
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import structlog

from vcuda import errors, k8s_types, kube
from vcuda.admission_review import (
    MAX_REPAIRED,
    AdmissionRequest,
    AdmissionResponse,
    Outcome,
    ReviewDeadline,
    TooManySteps,
    read_review,
    write_review,
)
from vcuda.claims.names import GROUP
from vcuda.k8s_types import Decoder
from webhook.caches import RecentChoices, SkippedMutate
from webhook.intake.bodies import MAX_BODY, ReviewHead
from webhook.intake.large_reviews import PLACES, QUOTA_PLACES, ReviewThread
from webhook.ledger.charging import Ledgers
from webhook.metrics import Metrics
from webhook.review import answers, context, first_limits, pod_review, quota_edit
from webhook.review.decisions import Creation, Simple

QUIET = frozenset({Outcome.IGNORED, Outcome.UNLIMITED, Outcome.MIRROR, Outcome.PROBED})
"""The outcomes of reviews of objects to which no quota applies, and of probes. They are logged at level debug only."""

# A thread decides each review of more than 64 KiB, because on the event loop it would delay all other reviews by 1 to 5
# ms or more (`python -m bench large-pods`). Most reviews have 4 to 20 KiB. The event loop decides these, because
# passing a small review to a thread takes about as long as answering it.
LARGE_REVIEW = 64 * 1024

MAX_REVIEW_STEPS = 1024
"""The most steps of a small review on the event loop. Steps are the parts of the work that grow with a product, such as
the entries of a claim times the GPU models of its namespace. A step takes about ten function calls. The other work is
linear in the size of the review."""

TOO_LARGE = (
    f"the admission review of this object has more than {MAX_BODY} bytes ({MAX_BODY // 2**20} MiB). "
    "In a review, each &, < and > takes six bytes, and the review of an update also contains the old object. "
    "Make the object smaller, for example move long texts to a ConfigMap"
)

MAX_NAME_LENGTH = 253
"""The maximum length of a name in a log line. The API server has not validated an object's name before /mutate."""

NOT_READ = "this replica has not read the quota and the nodes yet"
MALFORMED = "this replica has not read a quota, because the quota ConfigMap is malformed"


class NotReady(errors.Unavailable):
    """Raised if this webhook replica has not read the quota yet, or is stopping. The API server must call again, or
    call another replica."""


class Gate(msgspec.Struct):
    """Records whether this webhook replica is stopping, and whether it still answers requests."""

    leaving: bool = False
    """True if this replica's readiness check must fail. Requests are still answered until ``closed`` is True too."""
    closed: bool = False
    """True if every request must be answered with status 503."""

    def leave(self) -> None:
        self.leaving = True

    def close(self) -> None:
        self.leaving = self.closed = True


class Service(msgspec.Struct, frozen=True):
    """Answers reviews, which depend on the current policy (quota and nodes) and the ledgers (charges by namespace)."""

    policy: context.PolicySource
    ledgers: Ledgers
    metrics: Metrics
    gate: Gate
    log: structlog.typing.FilteringBoundLogger
    source: kube.QuotaSource = kube.QuotaSource()
    namespaces: quota_edit.NamespaceNames | None = None
    callers_known: bool = False
    """True if only the API server can send reviews."""
    pods: first_limits.Pods | None = None
    quota_valid: Callable[[], bool] = lambda: True
    """Returns False if the stored quota document is malformed."""
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    skipped: SkippedMutate = msgspec.field(default_factory=SkippedMutate)
    large_reviews: ReviewThread = msgspec.field(default_factory=lambda: ReviewThread("large-review", PLACES))
    quota_edits: ReviewThread = msgspec.field(default_factory=lambda: ReviewThread("quota-edit", QUOTA_PLACES))

    @property
    def ready(self) -> bool:
        return not self.gate.leaving and self.policy() is not None

    @property
    def why_unread(self) -> str:
        """Why there is no policy, for a replica that has none."""
        return NOT_READ if self.quota_valid() else MALFORMED

    def thread_for(self, path: str, size: int) -> ReviewThread | None:
        """Return the thread that decides a review of ``size`` bytes; None if the event loop decides the review."""
        # PyYAML needs seconds to parse a quota document of a few hundred KiB. So a thread decides each edit of the
        # quota.
        if path == "/quota":
            return self.quota_edits
        return self.large_reviews if size > LARGE_REVIEW else None

    async def answer(self, path: str, body: bytes, deadline: ReviewDeadline, line: str = "") -> bytes:
        """Return the encoded answer to the review in ``body``.

        ``line``: the namespace of the review. A large review waits in the queue until this namespace has its turn.
        Raises BadReview if the body is not an admission review, and Unavailable if it cannot be answered now.
        """
        started = time.perf_counter()
        if self.gate.closed:
            raise NotReady("this replica is stopping")
        thread = self.thread_for(path, len(body))
        if thread is None:
            return await self._answer_on_loop(path, body, started, deadline)
        work = functools.partial(self._answer, path, body, started, deadline)
        return await thread.run(work, self.ledgers, line, deadline)

    async def _answer_on_loop(self, path: str, body: bytes, started: float, deadline: ReviewDeadline) -> bytes:
        deadline.steps = MAX_REVIEW_STEPS
        try:
            return await self._answer(path, body, started, deadline, self.ledgers)
        except TooManySteps:
            deadline.steps = math.inf
        line, thread = ReviewHead.read(body).namespace, self.large_reviews
        work = functools.partial(self._answer, path, body, started, deadline)
        async with thread.place(line, len(body), deadline):
            return await thread.run(work, self.ledgers, line, deadline)

    def reject_too_large(self, path: str, head: ReviewHead, message: str = TOO_LARGE) -> bytes:
        """Return the encoded rejection of a review with too many bytes.

        ``head``: the uid and the namespace from the first bytes of the review. The other bytes are not read.
        """
        response = AdmissionResponse(Outcome.TOO_LARGE, False, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        self.metrics.observe(path, response, 0, head.namespace)
        self.log.info("admission", path=path, uid=head.uid, namespace=head.namespace, outcome=response.outcome)
        return write_review(head.uid, response)

    async def _answer(
        self, path: str, body: bytes, started: float, deadline: ReviewDeadline, ledgers: Ledgers
    ) -> bytes:
        deadline.check()
        try:
            request = read_review(body, deadline.check)
        except errors.BadReview as error:
            head = ReviewHead.read(body)
            if error.status is not HTTPStatus.REQUEST_ENTITY_TOO_LARGE or not head.uid:
                raise
            return self.reject_too_large(path, head, str(error))
        deadline.check()
        response = (await self._decide(path, request, deadline, ledgers)).bounded()
        try:
            reply = write_review(request.uid, response, deadline.check)
        except errors.BadReview as error:
            return self.reject_too_large(path, ReviewHead(request.uid, request.namespace), str(error))
        seconds = time.perf_counter() - started
        self.metrics.observe(path, response, seconds, request.namespace)
        self._log(path, request, response, seconds)
        return reply

    async def _decide(
        self, path: str, request: AdmissionRequest, deadline: ReviewDeadline, ledgers: Ledgers
    ) -> AdmissionResponse:
        policy = self.policy()
        if path == "/quota":
            # An edit of the quota is decided even if the present quota is malformed, so that an edit can repair it.
            verdict = await quota_edit.check_edit(
                request,
                self.source,
                policy,
                ledgers,
                callers_known=self.callers_known,
                namespaces=self.namespaces,
                pods=self.pods,
                check=deadline.check,
            )
            return answers.written(verdict)
        if policy is None:
            # Pods that cannot reach a GPU are admitted even before this replica has read the quota ConfigMap. Otherwise
            # a webhook that has just started would block the cluster. The ConfigMap names the GPU resources. So until
            # the ConfigMap is read, a pod that requests any resource with a domain in its name must be retried.
            pod = None if request.kind.group == GROUP else pod_review.gpu_pod_of(request, None)
            if isinstance(pod, Simple):
                return answers.written(pod)
            raise NotReady(self.why_unread)
        return await answers.answer(path, Creation(request, policy, ledgers, self.choices, deadline, self.skipped))

    def _log(self, path: str, request: AdmissionRequest, response: AdmissionResponse, seconds: float) -> None:
        if response.outcome in QUIET:
            self.log.debug("admission", path=path, uid=request.uid, outcome=response.outcome)
            return
        self.log.info(
            "admission",
            path=path,
            uid=request.uid,
            namespace=request.namespace[:MAX_NAME_LENGTH],
            pod=(request.name or _generated_name(request))[:MAX_NAME_LENGTH],
            model=response.model[:MAX_NAME_LENGTH],
            scheme=response.scheme,
            outcome=response.outcome,
            allowed=response.allowed,
            message=response.message or response.reason,
            dry_run=bool(request.dry_run),
            ms=round(seconds * 1000, 3),
        )


def _generated_name(request: AdmissionRequest) -> str:
    # A pod with generateName has no name at /mutate. The API server also leaves the name of the request empty then.
    try:
        named = _NAMED.decode(request.object).metadata
    except k8s_types.UNDECODABLE:
        return ""
    return named.name or f"{named.generate_name}*"


class _PodNames(k8s_types.K8sStruct, frozen=True):
    name: str = ""
    generate_name: str = ""


class _Named(k8s_types.K8sStruct, frozen=True):
    """An object with only name and generateName decoded, because decoding a large pod's annotations takes long."""

    metadata: _PodNames = _PodNames()


_NAMED = Decoder(_Named, MAX_REPAIRED)
