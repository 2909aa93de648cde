"""The webhook's work apart from HTTP: takes a review's bytes, gives its answer, counts and logs it."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import structlog

from vcuda import errors, k8s_types, kube
from vcuda.claims.objects import GROUP
from vcuda.quota.model import Usage
from webhook import claim_review, context, pod_review, quota_edit
from webhook.ledgers import ChargeRequest, Decision, Ledgers, RecentChoices
from webhook.metrics import Metrics

T = TypeVar("T")

QUIET = frozenset({"ignored", "unlimited", "mirror"})
"""Outcomes of pods that are none of the quota's business: counted, and logged at debug level only."""

MARGIN_SECONDS = 0.5
"""Kept back from the API server's timeout, so that the answer is there before it gives up."""

# So much takes 1 to 5 ms of the event loop, by the machine and its load, in which it serves nobody else
# (`python -m bench large-pods`). A usual review has 4 to 20 KiB; to hand one over takes about as long as to answer it.
LARGE_REVIEW = 64 * 1024

# One of them computes at a time; the others are those that wait for a ledger, which takes as long as the API server.
LARGE_REVIEW_THREADS = 8

# The longest that the API server waits for a webhook (validation of timeoutSeconds in admissionregistration/v1).
MAX_WAIT_SECONDS = 30.0


class NotReady(errors.Unavailable):
    """The quota has not been read yet, or the server is about to stop: another replica, or a later try, answers."""


class Gate(msgspec.Struct):
    """Whether this replica takes work: it stops in two steps, so that no request is lost.

    ``leaving``: readiness fails, while requests are still answered. ``closed``: late ones are sent elsewhere.
    """

    leaving: bool = False
    closed: bool = False

    def leave(self) -> None:
        """Fail readiness from now on."""
        self.leaving = True

    def close(self) -> None:
        """Send every further request elsewhere."""
        self.leaving = self.closed = True


class _LoopLedgers(msgspec.Struct, frozen=True):
    """The ledgers as a worker thread sees them: what they do is done on the event loop, for their state is its own.

    While it waits the thread gives ``computing`` away, the lock of those that decode and decide.
    """

    ledgers: Ledgers
    loop: asyncio.AbstractEventLoop
    computing: threading.Lock

    async def charge(self, request: ChargeRequest) -> Decision:
        return self._on_loop(self.ledgers.charge(request))

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        return self._on_loop(self.ledgers.usage(namespace))

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        return self._on_loop(self.ledgers.cached_usage(namespace))

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return self._on_loop(self.ledgers.stored_usage(namespace, charged, deadline))

    async def close(self) -> None:
        """Leave it to the event loop, which ends later."""

    def _on_loop(self, call: Coroutine[Any, Any, T]) -> T:
        done = asyncio.run_coroutine_threadsafe(call, self.loop)
        self.computing.release()
        try:
            # Blocks this thread, which has nothing else to do. Bounded, because a loop that ends answers nobody.
            return done.result(MAX_WAIT_SECONDS)
        except TimeoutError:
            if done.done():  # raised by the call itself
                raise
            done.cancel()
            raise errors.Unavailable("this replica stood still for too long") from None
        finally:
            self.computing.acquire()


class WorkerThreads:
    """Threads for reviews that take long to decode or to decide, so that the event loop serves the others meanwhile.

    One of them computes at a time: two would only take the interpreter's lock from the loop, and from one another.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LARGE_REVIEW_THREADS, thread_name_prefix="large-review")
        self._computing = threading.Lock()

    async def run(self, work: Callable[[Ledgers], Coroutine[Any, Any, T]], ledgers: Ledgers) -> T:
        """Return what ``work`` returns in a thread, given ledgers that it may use there."""
        loop = asyncio.get_running_loop()
        there = _LoopLedgers(ledgers, loop, self._computing)
        return await loop.run_in_executor(self._threads, self._compute, work, there)

    def _compute(self, work: Callable[[Ledgers], Coroutine[Any, Any, T]], ledgers: Ledgers) -> T:
        with self._computing:
            return asyncio.run(work(ledgers))


class Service(msgspec.Struct, frozen=True):
    """Everything a review is answered from."""

    policy: context.PolicySource
    ledgers: Ledgers
    metrics: Metrics
    gate: Gate
    log: structlog.typing.FilteringBoundLogger
    place: kube.QuotaPlace = kube.QuotaPlace()
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    large_pods: WorkerThreads = msgspec.field(default_factory=WorkerThreads)
    quota_edits: WorkerThreads = msgspec.field(default_factory=WorkerThreads)

    @property
    def ready(self) -> bool:
        """Whether the quota has been read and the replica is not about to stop."""
        return not self.gate.leaving and self.policy() is not None

    async def answer(self, path: str, body: bytes, timeout: float) -> bytes:
        """Return the review that answers the one in ``body``; ``timeout`` is the API server's, in seconds.

        Raises:
            BadReview: the body is no review this server answers.
            Unavailable: it cannot be answered now; nothing is allowed because something failed.

        """
        started = time.perf_counter()
        if self.gate.closed:
            raise NotReady("this replica is stopping")
        deadline = time.monotonic() + max(timeout - MARGIN_SECONDS, MARGIN_SECONDS)
        work = functools.partial(self._answer, path, body, started, deadline)
        if path == "/quota":
            # A document of a few hundred KiB takes PyYAML seconds; pods are not to wait behind it, large ones neither.
            return await self.quota_edits.run(work, self.ledgers)
        if len(body) > LARGE_REVIEW:
            return await self.large_pods.run(work, self.ledgers)
        return await work(self.ledgers)

    async def _answer(self, path: str, body: bytes, started: float, deadline: float, ledgers: Ledgers) -> bytes:
        request = k8s_types.read_review(body)
        response = await self._decide(path, request, deadline, ledgers)
        reply = k8s_types.write_review(request.uid, response)
        seconds = time.perf_counter() - started
        self.metrics.observe(path, response, seconds)
        self._log(path, request, response, seconds)
        return reply

    async def _decide(
        self, path: str, request: k8s_types.AdmissionRequest, deadline: float, ledgers: Ledgers
    ) -> k8s_types.AdmissionResponse:
        policy = self.policy()
        if path == "/quota":
            # Without a quota in force too: this is how a broken one is mended.
            return await quota_edit.check_edit(request, self.place, policy, ledgers)
        if request.kind.group == GROUP:
            return await self._decide_claim(path, request, policy, deadline, ledgers)
        if policy is None:
            # Pods that have nothing to do with GPUs pass all the same: a webhook that starts must not stop a cluster.
            # Any resource with a domain may be one of the units, so who asks for one waits.
            pod = pod_review.gpu_pod_of(request)
            if isinstance(pod, k8s_types.AdmissionResponse):
                return pod
            raise NotReady("the quota has not been read yet")
        try:
            if path == "/mutate":
                return await pod_review.mutate(request, policy, ledgers, self.choices, deadline)
            return await pod_review.validate(request, policy, ledgers, self.choices, deadline)
        except (errors.UnreadableLedger, errors.LedgerLost) as error:
            # Without retryAfterSeconds: controllers would sleep on it in one of their few workers.
            return _without_ledger(error, HTTPStatus.TOO_MANY_REQUESTS)

    async def _decide_claim(
        self,
        path: str,
        request: k8s_types.AdmissionRequest,
        policy: context.PolicySnapshot | None,
        deadline: float,
        ledgers: Ledgers,
    ) -> k8s_types.AdmissionResponse:
        if policy is None:
            raise NotReady("the quota has not been read yet")
        try:
            if path == "/mutate":
                return await claim_review.mutate(request, policy, ledgers, self.choices, deadline)
            return await claim_review.validate(request, policy, ledgers, self.choices, deadline)
        except (errors.UnreadableLedger, errors.LedgerLost) as error:
            return _without_ledger(error, HTTPStatus.FORBIDDEN)

    def _log(
        self, path: str, request: k8s_types.AdmissionRequest, response: k8s_types.AdmissionResponse, seconds: float
    ) -> None:
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


def _without_ledger(
    error: errors.UnreadableLedger | errors.LedgerLost, while_lost: HTTPStatus
) -> k8s_types.AdmissionResponse:
    # An answer, not an HTTP error: that the API server would ignore, and then refuse the pod as not pinned.
    if isinstance(error, errors.LedgerLost):
        return k8s_types.AdmissionResponse("ledger-lost", False, while_lost, str(error))
    return k8s_types.AdmissionResponse("unreadable-ledger", False, HTTPStatus.INTERNAL_SERVER_ERROR, str(error))


def _generated_name(request: k8s_types.AdmissionRequest) -> str:
    # In /mutate a pod under generateName has no name yet, in the request neither.
    try:
        named = msgspec.json.decode(request.object, type=_Named).metadata
    except k8s_types.UNDECODABLE:
        return ""
    return named.name or f"{named.generate_name}*"


class _PodNames(k8s_types.K8sStruct, frozen=True):
    name: str = ""
    generate_name: str = ""


# The names alone: the annotations of a large pod take longer to decode than all else in it.
class _Named(k8s_types.K8sStruct, frozen=True):
    metadata: _PodNames = _PodNames()
