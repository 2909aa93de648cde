"""Many callers that create pods and delete them again, and keep count of what they were answered."""

import itertools
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from tests.builders import MODEL
from tests.e2e.cluster import Json
from tests.e2e.installation import REPLICA, Installation, flags_of
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.rest import Answer, Rest, states
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
    (NOT_PINNED, {403}, r"held to one GPU model that namespace \S+ may use"),
    (POLICY, {403}, rf"{REFUSAL}$"),
    (LEDGER_LOST, {429}, r"ledger of namespace \S+ was lost; pods that were charged in it may still be stored"),
    (BUSY, {429}, r"try again in 1 s$"),
    (WEBHOOK_AWAY, {500}, r"failed calling webhook \"validate(-\d)?\.quota\.vcuda\.io\""),
    (API_AWAY, {500, 503, 504}, r"etcd|rpc error|did not complete|context (deadline|canceled)|shut ?down|timed? ?out"),
)

GPU_REQUESTS: Sequence[Json] = (
    {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 16},
    {"tencent.com/vcuda-core": 100},
    {"tencent.com/vcuda-core": 200},
)
SLOW_PART = 0.3
"""The part of the pods that wait for another webhook."""

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

    They share out the namespaces of one group, and go on to the next group every ``stay`` seconds.
    """

    rest: Rest
    groups: Sequence[Sequence[str]]
    replicas: int
    stay: float
    started: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, number: int, stop: threading.Event) -> None:
        labels = self.labels(number)
        for turn in itertools.count():
            namespaces = self.present()
            pod = self._pod(f"train-{number}-{turn}", namespaces[number // self.replicas % len(namespaces)], labels)
            answer = self._create(pod)
            with self.lock:
                self.counts[answer] += 1
            if answer in (STORED, API_AWAY):
                stop.wait(random.uniform(0, HOLD))  # noqa: S311  # a load
                self._delete(pod, stop)
            if stop.wait(random.uniform(0, PAUSE)):  # noqa: S311  # a load
                return

    def present(self) -> Sequence[str]:
        """The namespaces of the present group."""
        group = int((time.monotonic() - self.started) / self.stay)
        return self.groups[min(group, len(self.groups) - 1)]

    def labels(self, number: int) -> Mapping[str, str]:
        """Those by which one of the replicas is asked."""
        return {REPLICA: str(number % self.replicas)}

    def _pod(self, name: str, namespace: str, labels: Mapping[str, str]) -> Json:
        asks = {ASKS: "true"} if random.random() < SLOW_PART else {}  # noqa: S311  # a load
        return gpu_pod(name, namespace, random.choice(GPU_REQUESTS), labels={**labels, **asks})  # noqa: S311  # a load

    def _create(self, pod: Json) -> str:
        try:
            return reason(self.rest.send("POST", f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods", pod))
        except HTTPError:
            return API_AWAY

    def _delete(self, pod: Json, stop: threading.Event) -> None:
        """Delete the pod, stored or not, until the API server says that it is gone."""
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        while not stop.is_set():
            try:
                answer = self.rest.send("DELETE", path, {"gracePeriodSeconds": 0})
            except HTTPError:
                answer = None
            if answer is not None and answer.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):
                return
            stop.wait(PAUSE)


def think(_path: str, review: Json) -> Json:
    """Take a while about a review, and refuse some."""
    time.sleep(random.uniform(0, SLOWEST))  # noqa: S311  # a load
    allowed = random.random() > REFUSED_PART  # noqa: S311  # a load
    return reviewed(review, allowed=allowed, status={"code": 403, "message": REFUSAL})


@contextmanager
def policy(directory: Path, timeout: int) -> Iterator[Json]:
    """The webhook, running, as an item of a configuration; ``directory`` holds its certificate and ``ca.crt``."""
    with answering(think, directory) as url:
        yield asks_about_pods("policy.e2e.vcuda.io", url, directory, ASKS, sideEffects="None", timeoutSeconds=timeout)


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


CORES = "tencent.com/vcuda-core"
PODS = "/api/v1/pods"
LOOK_PAUSE, MEMORY_PAUSE = 0.02, 0.2
WATCH_SECONDS = 5.0
AWAY = (ApiException, HTTPError, json.JSONDecodeError)
"""What the client raises where the API server is away, or goes away within an answer."""


def held(pods: Sequence[Json]) -> Counter[str]:
    """The cores that the pods hold of each model. It shares no line with the code it judges."""
    cores: Counter[str] = Counter()
    for pod in pods:
        if pod["status"].get("phase") not in ("Succeeded", "Failed"):
            cores[model_of(pod)] += sum(
                int(container["resources"]["limits"][CORES]) for container in pod["spec"]["containers"]
            )
    return cores


def model_of(pod: Json) -> str:
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [model] = {
        value
        for term in required["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
        if expression["key"] == MODEL
        for value in expression["values"]
    }
    return str(model)


class Ghosts:
    """Bound pods that were torn away: their containers may run on, so that what they hold is held for a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._found: dict[str, tuple[float, str, str, int]] = {}

    def add(self, pod: Json, deleted: float) -> None:
        """Remember a pod whose deletion was asked for at this moment, or later."""
        [(model, cores)] = held([pod]).items()
        self._found[pod["metadata"]["uid"]] = (deleted + self._seconds, pod["metadata"]["namespace"], model, cores)

    def among(self, known: Set[str], there: Set[str]) -> Iterator[tuple[str, str, int]]:
        """Namespace, model and cores of those that were known, are not there any more, and whose time is not over."""
        now = time.monotonic()
        for uid, (until, namespace, model, cores) in list(self._found.items()):
            if uid in known and uid not in there and now < until:
                yield namespace, model, cores


@dataclass
class Observer:
    """What was seen of some namespaces.

    ``most``: the most cores of each model, by namespace. ``looks``: how often. ``lost``: how often in vain. ``known``:
    the uids of all pods that there were.
    """

    most: Mapping[str, dict[str, int]]
    ghosts: Ghosts
    looks: int = 0
    lost: int = 0
    known: set[str] = field(default_factory=set)

    def see(self, pods: Sequence[Json]) -> None:
        """Count what is held by the pods of one moment, and by those that were torn away before it."""
        self.looks += 1
        by_namespace = {namespace: Counter[str]() for namespace in self.most}
        for pod in pods:
            if (counted := by_namespace.get(pod["metadata"]["namespace"])) is not None:
                counted.update(held([pod]))
        uids = {pod["metadata"]["uid"] for pod in pods}
        for namespace, model, cores in self.ghosts.among(self.known, uids):
            by_namespace[namespace][model] += cores
        self.known |= uids
        for namespace, counts in by_namespace.items():
            most = self.most[namespace]
            most.update({model: max(most.get(model, 0), cores) for model, cores in counts.items()})

    def list(self, rest: Rest, stop: threading.Event) -> None:
        """LIST until told to stop. Without a resourceVersion that is a quorum read of one moment."""
        while not stop.wait(LOOK_PAUSE):
            try:
                self.see(rest.get(PODS)["items"])
            except AWAY:
                self.lost += 1

    def follow(self, rest: Rest, stop: threading.Event) -> None:
        """See the state after every single change, until told to stop; LIST anew where the watch ends or breaks."""
        while not stop.wait(LOOK_PAUSE):
            try:
                for pods in states(rest, PODS, time.monotonic() + WATCH_SECONDS, {}):
                    self.see(pods)
            except (*AWAY, RuntimeError):
                self.lost += 1
