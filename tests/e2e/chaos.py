"""The load of the chaos test: many callers create and delete pods and claims, and count the answers.

This module also has the webhook replicas and controllers, which the test kills and replaces.
"""

import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from urllib3.exceptions import HTTPError

from tests.e2e.cluster import Json, webhook
from tests.e2e.dra import HAMI, claim, claiming, claims_path, request, template
from tests.e2e.installation import CLAIM_RULE, REPLICA
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.rest import Answer, Rest
from tests.integration.reviews import gpu_pod
from tests.processes import PATIENCE, ControllerProcess, Fields, OwnProcess, WebhookProcess, memory

ASKS = "e2e.vcuda.io/policy"
"""The label of pods and claims that a slow second webhook also reviews, and sometimes rejects after the charge."""

REJECTION = "rejected by another policy"
SLOWEST, REJECTED_PART = 1.5, 0.1

STORED = "stored"
OVER_QUOTA = "over quota"
LEDGER_LOST = "ledger lost, or replica killed while it created the ledger (403)"
BUSY = "busy, retry later (429)"
NOT_PINNED = "not pinned to a model: /mutate was not reached"
WEBHOOK_AWAY = "webhook not reached"
POLICY = "rejected by another policy, after it was charged"
API_AWAY = "API server or etcd not reached"

_REASONS = (
    (
        OVER_QUOTA,
        {403, 429},
        r"(exceeded|larger than the GPU) quota: \w+ in (namespace|team) \S+, requested: .* limited: ",
    ),
    (NOT_PINNED, {403}, r"(the pod to|the products of) one GPU model of namespace \S+ \("),
    (POLICY, {403}, rf"{REJECTION}$"),
    (LEDGER_LOST, {403}, r"ledger of namespace \S+ was lost\. Pods that were charged in the ledger may"),
    # A claim gets 403 where a pod gets 429, because controllers that create claims must not wait for a retry.
    (BUSY, {403, 429}, r"try again in 1 s$|pods and claims of this namespace are not seen stored yet$"),
    (WEBHOOK_AWAY, {500}, r"failed calling webhook \"validate(-claims)?(-\d)?\.quota\.vcuda\.io\""),
    (API_AWAY, {504}, ""),  # an API server that stops may answer 504 without a reason
    (API_AWAY, {500, 503}, r"etcd|rpc error|did not complete|context (deadline|canceled)|shut ?down|timed? ?out"),
)

GPU_REQUESTS: Sequence[Json] = (
    {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 16},
    {"tencent.com/vcuda-core": 100},
    {"tencent.com/vcuda-core": 200},
)
CLAIM_REQUESTS: Sequence[Json] = (
    request(),
    request(count=2),
    request(HAMI, capacity={"requests": {"cores": "50", "memory": "4Gi"}}),
)
SLOW_PART, CLAIM_PART, TEMPLATE_PART = 0.1, 0.3, 0.05
"""Fractions of the objects that the callers create.

SLOW_PART: objects that the slow webhook also reviews. CLAIM_PART: claims. TEMPLATE_PART: pods with a claim template.
"""

ROOMY_PART = 0.75
"""The fraction of objects that are created in the roomy namespace. Its quota is so large that replicas hold
reservations.
"""

LEADING, REAPED = "this replica leads now", "releasing the reservation of a replica that has ended"
INTERNAL, NOT_ANSWERED = "internal error", "not answered"
TOLD = (LEADING, REAPED, INTERNAL, NOT_ANSWERED)
"""The log events of our programs that the chaos test evaluates, also after the program was killed."""

SAMPLE_PAUSE = 0.5
SPENT = re.compile(rb"^vcuda_ledger_spent_total (\S+)", re.MULTILINE)
HOLD, PAUSE = 0.3, 0.2
"""HOLD: maximum seconds between the creation and the deletion of a pod.

PAUSE: maximum seconds between two creates of one caller.
"""

ROOMY_HOLD = 4.0
"""Seconds between the creation and the deletion of a pod in the roomy namespace (the namespace with a large quota)."""


def reason(answer: Answer) -> str:
    """Return `STORED` if the object was created, or else the name of the reason for the rejection.

    If the reason is unknown, return the status and the message.
    """
    if answer.status == HTTPStatus.CREATED:
        return STORED
    for name, statuses, pattern in _REASONS:
        if answer.status in statuses and re.search(pattern, answer.message):
            return name
    return f"{answer.status} {answer.message}"


def counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


REASONS = frozenset({STORED, API_AWAY, *(name for name, _, _ in _REASONS)})


@dataclass(frozen=True)
class Callers:
    """Callers that create and delete objects. Each caller uses one replica and one API server.

    All callers use the namespaces of one group, and change to the next group every ``stay`` seconds. Most objects are
    in the first namespace of the group, the roomy namespace, which has a large quota.

    ``claims``: True if the callers also create ResourceClaims, and pods with a template of `templates`. ``started``:
    the monotonic time in seconds at which the first group began. ``counts``, ``claim_counts``: the number of answers by
    reason, for pods and for claims. ``keep``: while it is set, nothing in the roomy namespace is deleted, so that its
    quota is soon used up.
    """

    rests: Sequence[Rest]
    groups: Sequence[Sequence[str]]
    replicas: int
    stay: float
    claims: bool = False
    started: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    claim_counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    keep: threading.Event = field(default_factory=threading.Event)

    @property
    def creates(self) -> int:
        with self.lock:
            return self.counts.total() + self.claim_counts.total()

    def call(self, number: int, stop: threading.Event) -> None:
        labels, rest = self.labels(number), self.rests[number // self.replicas % len(self.rests)]
        kept: deque[tuple[float, Json]] = deque()
        for turn in itertools.count():
            roomy, *others = self.present()
            namespace = roomy if random.random() < ROOMY_PART else random.choice(others)  # noqa: S311  # random load
            made = self._manifest(f"train-{number}-{turn}", namespace, labels)
            answer = created(rest, made)
            with self.lock:
                (self.claim_counts if made["kind"] == "ResourceClaim" else self.counts)[answer] += 1
            if answer in (STORED, API_AWAY):
                if namespace == roomy:
                    kept.append((time.monotonic() + ROOMY_HOLD, made))
                else:
                    stop.wait(random.uniform(0, HOLD))  # noqa: S311  # random load
                    delete(rest, made, stop)
            while kept and kept[0][0] < time.monotonic() and not self.keep.is_set():
                delete(rest, kept.popleft()[1], stop)
            if stop.wait(random.uniform(0, PAUSE)):  # noqa: S311  # random load
                return

    def present(self) -> Sequence[str]:
        return self.groups[int((time.monotonic() - self.started) / self.stay) % len(self.groups)]

    def labels(self, number: int) -> Mapping[str, str]:
        """Return labels for the objects of caller ``number``. They select the replica that reviews the objects."""
        return {REPLICA: str(number % self.replicas)}

    def _manifest(self, name: str, namespace: str, labels: Mapping[str, str]) -> Json:
        kind = random.random() if self.claims else 1  # noqa: S311  # random load
        if kind < TEMPLATE_PART:
            return labelled(claiming(namespace, name, resourceClaimTemplateName=f"gpu-{labels[REPLICA]}"), labels)
        asks = {ASKS: "true"} if random.random() < SLOW_PART else {}  # noqa: S311  # random load
        if kind < TEMPLATE_PART + CLAIM_PART:
            return labelled(claim(namespace, name, random.choice(CLAIM_REQUESTS)), {**labels, **asks})  # noqa: S311  # random load
        return gpu_pod(name, namespace, random.choice(GPU_REQUESTS), labels={**labels, **asks})  # noqa: S311  # random load


def created(rest: Rest, made: Json) -> str:
    try:
        return reason(rest.send("POST", path_of(made), made))
    except HTTPError:
        return API_AWAY


def delete(rest: Rest, made: Json, stop: threading.Event) -> None:
    """Send deletions of a pod or claim until the API server confirms one, or until the object does not exist."""
    path = f"{path_of(made)}/{made['metadata']['name']}"
    while not stop.is_set():
        try:
            answer = rest.send("DELETE", path, {"gracePeriodSeconds": 0})
        except HTTPError:
            answer = None
        if answer is not None and answer.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
            return
        stop.wait(PAUSE)


def labelled(manifest: Json, labels: Mapping[str, str]) -> Json:
    return {**manifest, "metadata": {**manifest["metadata"], "labels": dict(labels)}}


def path_of(made: Json) -> str:
    namespace = made["metadata"]["namespace"]
    return claims_path(namespace) if made["kind"] == "ResourceClaim" else f"/api/v1/namespaces/{namespace}/pods"


def templates(namespace: str, replicas: int) -> list[Json]:
    """Return a ResourceClaimTemplate for each replica. The slow webhook also reviews claims of the last template."""
    every = [{REPLICA: str(number)} for number in range(replicas)]
    every[-1][ASKS] = "true"
    return [template(namespace, f"gpu-{labels[REPLICA]}", labels=labels) for labels in every]


def think(_path: str, review: Json) -> Json:
    """Answer a review, as the slow webhook does: after a random delay, and with a rejection of some objects."""
    time.sleep(random.uniform(0, SLOWEST))  # noqa: S311
    allowed = random.random() > REJECTED_PART  # noqa: S311  # random load
    return reviewed(review, allowed=allowed, status={"code": 403, "message": REJECTION})


@contextmanager
def policy(directory: Path, timeout: int) -> Iterator[Json]:
    """Run the slow webhook for objects with the label `ASKS`, and yield its item of a webhook configuration.

    ``directory``: the directory with the webhook's certificate and ``ca.crt``.
    """
    with answering(think, directory) as url:
        about = {"rules": [*webhook("")["rules"], CLAIM_RULE], "sideEffects": "None", "timeoutSeconds": timeout}
        yield asks_about_pods("policy.e2e.vcuda.io", url, directory, ASKS, **about)


P = TypeVar("P", bound=OwnProcess)


class Victim(Generic[P]):
    """A process that a test kills. After that, ``start`` runs in the background and returns the replacement.

    ``crashes``: how many processes had ended by themselves before they were killed.
    """

    def __init__(self, start: Callable[[], P], threads: ThreadPoolExecutor, first: P | None = None) -> None:
        self.kills = self.crashes = 0
        self._told: list[Fields] = []
        self._start = start
        self._threads = threads
        self._running: Future[P] = Future()
        self._running.set_result(first or start())

    def current(self) -> P:
        return self._running.result(PATIENCE)

    def serving(self) -> P | None:
        """Return the process. None while the replacement starts, or if the process has ended by itself."""
        if not self._running.done() or self.current().process.poll() is not None:
            return None
        return self.current()

    def kill(self, *, counted: bool = True) -> None:
        self.kills += counted
        self.crashes += self.has_ended
        ended = self.current()
        ended.kill()
        self._told += lines_of(ended)
        self._running = self._threads.submit(self._start)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.current().process.pid, number)

    @property
    def has_ended(self) -> bool:
        return self._running.done() and self.serving() is None

    def history(self, event: str) -> list[Fields]:
        """Return the log lines with ``event``, one of `TOLD`, of this process and of the killed ones before it."""
        return [line for line in (*self._told, *lines_of(self.current())) if line["event"] == event]


def lines_of(process: OwnProcess) -> list[Fields]:
    return [line for event in TOLD for line in process.logs(event)]


Make = Callable[..., WebhookProcess]
"""A function that starts a webhook replica with the given flags in addition to the usual flags."""


@contextmanager
def replicas(makes: Sequence[Make]) -> Iterator[Sequence[Victim[WebhookProcess]]]:
    """Run webhook replicas that a test can kill. A replacement listens at the address of the killed replica."""

    def victim(make: Make, first: WebhookProcess) -> Victim[WebhookProcess]:
        return Victim(partial(make, "--bind", urlsplit(first.url).netloc), threads, first)

    with ThreadPoolExecutor() as threads:
        every = [victim(make, make()) for make in makes]
        try:
            yield every
        finally:
            for replica in every:
                replica.current().kill()


@dataclass
class Figures:
    """Measurements of the webhook replicas: their memory, and the charges that they admitted from reservations.

    ``worker``: maximum memory of a worker process in MiB. ``replica``: maximum memory of all processes of a replica
    together, in MiB. ``spent``: number of charges that were admitted from reservations, by the process id of the
    worker.
    """

    worker: int = 0
    replica: int = 0
    samples: int = 0
    spent: dict[int, float] = field(default_factory=dict)

    def sample(self, victim: Victim[WebhookProcess], stop: threading.Event) -> None:
        while not stop.wait(SAMPLE_PAUSE):
            if process := victim.serving():
                # The figures cannot be read if the process has just ended, or if it has no worker yet.
                with suppress(OSError, ValueError, HTTPException):
                    worker = process.worker()
                    self.worker = max(self.worker, memory(worker))
                    parts = [memory(pid, "Pss", "smaps_rollup") for pid in (worker, process.process.pid)]
                    self.replica = max(self.replica, sum(parts))
                    [told] = SPENT.findall(process.get("/metrics").body)
                    self.spent[worker] = float(told)
                    self.samples += 1


@dataclass
class Controllers:
    """Controllers that compete for one Lease. The holder of the Lease is the leader."""

    candidates: Sequence[Victim[ControllerProcess]]

    def kill_leader(self) -> bool:
        """Kill the leader with SIGKILL, and return True. If no controller is the leader, return False."""
        for candidate in self.candidates:
            process = candidate.serving()
            if process and process.logs(LEADING):
                candidate.kill()
                return True
        return False

    def mend(self) -> None:
        for candidate in self.candidates:
            if candidate.has_ended:
                candidate.kill(counted=False)

    def history(self, event: str) -> list[Fields]:
        return [line for candidate in self.candidates for line in candidate.history(event)]


@contextmanager
def controllers(makes: Sequence[Callable[[], ControllerProcess]]) -> Iterator[Controllers]:
    with ThreadPoolExecutor() as threads:
        every = [Victim(make, threads) for make in makes]
        try:
            yield Controllers(every)
        finally:
            for candidate in every:
                candidate.current().kill()
