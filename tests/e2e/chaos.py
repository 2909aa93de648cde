"""Many callers that create pods and claims and delete them again, and keep count of what they were answered."""

import itertools
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from urllib3.exceptions import HTTPError

from tests.e2e.cluster import Json, webhook
from tests.e2e.dra import HAMI, claim, claiming, claims_path, request, template
from tests.e2e.installation import CLAIM_RULE, REPLICA, Installation, flags_of
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.rest import Answer, Rest
from tests.integration.reviews import gpu_pod
from tests.processes import PATIENCE, ControllerProcess, OwnProcess, WebhookProcess

ASKS = "e2e.vcuda.io/policy"
"""The label of the pods that another policy is asked about, which takes SLOWEST seconds at most."""

REFUSAL = "refused by another policy"
SLOWEST, REFUSED_PART = 1.5, 0.1

STORED = "stored"
OVER_QUOTA = "over quota"
LEDGER_LOST = "ledger lost, or killed while it was made (429)"
BUSY = "busy, come again (429)"
NOT_PINNED = "not held to a model: /mutate was not reached"
WEBHOOK_AWAY = "webhook not reached"
POLICY = "refused by another policy, after it was charged"
API_AWAY = "API server or etcd not reached"

_REASONS = (
    (OVER_QUOTA, {403, 429}, r"exceeded GPU quota: \w+ in namespace \S+, requested: .* limited: "),
    (NOT_PINNED, {403}, r"held to (the products of )?one GPU model that namespace \S+ may use"),
    (POLICY, {403}, rf"{REFUSAL}$"),
    # Claims are never told to come again by 429.
    (LEDGER_LOST, {403, 429}, r"ledger of namespace \S+ was lost; pods that were charged in it may still be stored"),
    (BUSY, {403, 429}, r"try again (in 1 s|later)$"),
    (WEBHOOK_AWAY, {500}, r"failed calling webhook \"validate(-claims)?(-\d)?\.quota\.vcuda\.io\""),
    (API_AWAY, {500, 503, 504}, r"etcd|rpc error|did not complete|context (deadline|canceled)|shut ?down|timed? ?out"),
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
SLOW_PART, CLAIM_PART, TEMPLATE_PART = 0.3, 0.3, 0.05
"""The parts of what is created that wait for another webhook, that are claims, and pods with a template of one."""

MEMORY_PAUSE = 0.2
HOLD, PAUSE = 0.3, 0.2
"""Seconds, at most, for which a pod is kept, and between two tries of one caller."""


def reason(answer: Answer) -> str:
    """Why a pod was refused, or that it was not; the whole answer where no reason is known."""
    if answer.status == HTTPStatus.CREATED:
        return STORED
    for name, statuses, pattern in _REASONS:
        if answer.status in statuses and re.search(pattern, answer.message):
            return name
    return f"{answer.status} {answer.message}"


REASONS = frozenset({STORED, API_AWAY, *(name for name, _, _ in _REASONS)})


@dataclass(frozen=True)
class Callers:
    """So many callers, each through one of the replicas; ``counts`` are their answers by reason.

    They share out the namespaces of one group, and go on to the next group every ``stay`` seconds. ``claims``: they
    create ResourceClaims, too, and pods that have one made by a template of `templates`.
    """

    rest: Rest
    groups: Sequence[Sequence[str]]
    replicas: int
    stay: float
    claims: bool = False
    started: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    claim_counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, number: int, stop: threading.Event) -> None:
        labels = self.labels(number)
        for turn in itertools.count():
            namespaces = self.present()
            namespace = namespaces[number // self.replicas % len(namespaces)]
            made = self._manifest(f"train-{number}-{turn}", namespace, labels)
            answer = self._create(made)
            with self.lock:
                (self.claim_counts if made["kind"] == "ResourceClaim" else self.counts)[answer] += 1
            if answer in (STORED, API_AWAY):
                stop.wait(random.uniform(0, HOLD))  # noqa: S311  # a load
                self._delete(made, stop)
            if stop.wait(random.uniform(0, PAUSE)):  # noqa: S311  # a load
                return

    def present(self) -> Sequence[str]:
        """The namespaces of the present group."""
        group = int((time.monotonic() - self.started) / self.stay)
        return self.groups[min(group, len(self.groups) - 1)]

    def labels(self, number: int) -> Mapping[str, str]:
        """Those by which one of the replicas is asked."""
        return {REPLICA: str(number % self.replicas)}

    def _manifest(self, name: str, namespace: str, labels: Mapping[str, str]) -> Json:
        kind = random.random() if self.claims else 1  # noqa: S311  # a load
        if kind < TEMPLATE_PART:
            return labelled(claiming(namespace, name, resourceClaimTemplateName=f"gpu-{labels[REPLICA]}"), labels)
        asks = {ASKS: "true"} if random.random() < SLOW_PART else {}  # noqa: S311  # a load
        if kind < TEMPLATE_PART + CLAIM_PART:
            return labelled(claim(namespace, name, random.choice(CLAIM_REQUESTS)), {**labels, **asks})  # noqa: S311  # a load
        return gpu_pod(name, namespace, random.choice(GPU_REQUESTS), labels={**labels, **asks})  # noqa: S311  # a load

    def _create(self, made: Json) -> str:
        try:
            return reason(self.rest.send("POST", path_of(made), made))
        except HTTPError:
            return API_AWAY

    def _delete(self, made: Json, stop: threading.Event) -> None:
        """Delete the pod or claim, stored or not, until the API server says that it is gone, or will be."""
        path = f"{path_of(made)}/{made['metadata']['name']}"
        while not stop.is_set():
            try:
                answer = self.rest.send("DELETE", path, {"gracePeriodSeconds": 0})
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
    """One for each replica, which is asked about its claims; of the last the other policy is asked, too."""
    every = [{REPLICA: str(number)} for number in range(replicas)]
    every[-1][ASKS] = "true"
    return [template(namespace, f"gpu-{labels[REPLICA]}", labels=labels) for labels in every]


def think(_path: str, review: Json) -> Json:
    """Take a while about a review, and refuse some."""
    time.sleep(random.uniform(0, SLOWEST))  # noqa: S311  # a load
    allowed = random.random() > REFUSED_PART  # noqa: S311  # a load
    return reviewed(review, allowed=allowed, status={"code": 403, "message": REFUSAL})


@contextmanager
def policy(directory: Path, timeout: int) -> Iterator[Json]:
    """The webhook, running, as an item of a configuration; ``directory`` holds its certificate and ``ca.crt``."""
    with answering(think, directory) as url:
        about = {"rules": [*webhook("")["rules"], CLAIM_RULE], "sideEffects": "None", "timeoutSeconds": timeout}
        yield asks_about_pods("policy.e2e.vcuda.io", url, directory, ASKS, **about)


P = TypeVar("P", bound=OwnProcess)


class Victim(Generic[P]):
    """One process of a Deployment: where it ends, another takes its place, made by ``start`` in the background."""

    def __init__(self, start: Callable[[], P], threads: ThreadPoolExecutor, first: P | None = None) -> None:
        self.kills = 0
        self._start = start
        self._threads = threads
        self._running: Future[P] = Future()
        self._running.set_result(first or start())

    def current(self) -> P:
        return self._running.result(PATIENCE)

    def serving(self) -> P | None:
        """The same, or None while it is on its way or has ended."""
        if not self._running.done() or self.current().process.poll() is not None:
            return None
        return self.current()

    def kill(self, *, counted: bool = True) -> None:
        """SIGKILL; another takes its place."""
        self.kills += counted
        self.current().kill()
        self._running = self._threads.submit(self._start)

    def mend(self) -> None:
        """Let another take the place of one that has ended by itself."""
        if self._running.done() and self.serving() is None:
            self.kill(counted=False)


@contextmanager
def replicas(installation: Installation) -> Iterator[Sequence[Victim[WebhookProcess]]]:
    """The installation's replicas as things to kill; a new one listens where the old one did."""

    def starter(first: WebhookProcess) -> Callable[[], WebhookProcess]:
        flags = (*installation.flags, "--bind", urlsplit(first.url).netloc)
        return lambda: WebhookProcess(flags, installation.ca, {})

    with ThreadPoolExecutor() as threads:
        every = [Victim(starter(first), threads, first) for first in installation.replicas]
        try:
            yield every
        finally:
            for replica in every:
                replica.current().kill()


@dataclass
class Memory:
    """The most memory that one of the replicas had, in MiB: its worker alone, and all its processes together."""

    worker: int = 0
    replica: int = 0
    samples: int = 0

    def sample(self, victims: Sequence[Victim[WebhookProcess]], stop: threading.Event) -> None:
        """Look at each that is there, until told to stop. The kernel keeps the most that a process ever had."""
        while not stop.wait(MEMORY_PAUSE):
            for process in filter(None, [victim.serving() for victim in victims]):
                # It may have ended meanwhile, or have no worker yet.
                with suppress(OSError, ValueError):
                    worker = process.worker()
                    self.worker = max(self.worker, kernel_says(worker, "status", "VmHWM"))
                    parts = [kernel_says(pid, "smaps_rollup", "Pss") for pid in (worker, process.process.pid)]
                    self.replica = max(self.replica, sum(parts))
                    self.samples += 1


def kernel_says(pid: int, file: str, field_name: str) -> int:
    """A figure of a process, in MiB."""
    found = re.search(rf"^{field_name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    if not found:
        raise ProcessLookupError(pid)
    return int(found[1]) // 1024


@dataclass
class Controllers:
    """Candidates for one lease."""

    candidates: Sequence[Victim[ControllerProcess]]
    _leader: ControllerProcess | None = None

    @property
    def kills(self) -> int:
        return sum(candidate.kills for candidate in self.candidates)

    def kill_seasoned_leader(self) -> None:
        """SIGKILL the leader if it led already when this was asked last, so that each one gets to settle something."""
        serving = [(candidate, candidate.serving()) for candidate in self.candidates]
        leading = [(candidate, process) for candidate, process in serving if process and process.logs("leading")]
        leader, process = leading[0] if leading else (None, None)
        if leader and process is self._leader:
            leader.kill()
        self._leader = process


@contextmanager
def controllers(installation: Installation, count: int, *more: str) -> Iterator[Controllers]:
    """So many controllers, with these further flags."""
    flags = flags_of(installation, *more)
    with ThreadPoolExecutor() as threads:
        every = [Victim(lambda: ControllerProcess(*flags), threads) for _ in range(count)]
        try:
            yield Controllers(every)
        finally:
            for candidate in every:
                candidate.current().kill()
