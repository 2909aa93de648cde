"""Creates pods without pause while a part of the system fails. Counts the answers."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from threading import Event, Lock

from urllib3.exceptions import HTTPError

from tests.e2e.cluster import Cluster, Json
from tests.e2e.steady import in_threads
from tests.processes import eventually
from tests.real.pods import gated

LOAD, TIGHT, LIMIT = "team-load", "team-tight", 3
CALLERS = 4
"""The number of threads that create pods in `LOAD`. One more thread creates pods in `TIGHT`."""
NO_ANSWER = "no answer"
_numbers = count()


@dataclass
class Answers:
    """The answers to the creates so far.

    ``counts``: the number of answers by status, or `NO_ANSWER`. ``problems``: each answer other than 201, with its
    time. ``most``: the largest number of pods that were stored in the namespace whose quota is always used up.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    most: int = 0
    _lock: Lock = field(default_factory=Lock)

    def record(self, status: str, message: str = "") -> None:
        with self._lock:
            self.counts[status] += 1
            if status != str(HTTPStatus.CREATED.value):
                self.problems.append(f"{time.strftime('%T')} {status} {message[:300]}")

    @property
    def created(self) -> int:
        return self.counts["201"]

    def await_more(self, number: int, timeout: float = 120) -> None:
        goal = self.created + number
        eventually(lambda: self.created >= goal, lambda: self, timeout)

    def only(self, *others: str) -> None:
        """Assert that each answer was 201 or one of ``others``, and that no quota was exceeded."""
        print(f"\n{dict(self.counts)}", *self.problems[:20], sep="\n  ")
        assert self.counts.keys() <= {"201", *others}, self.problems
        assert 0 < self.most <= LIMIT


@contextmanager
def creating(cluster: Cluster) -> Iterator[Answers]:
    """Create and delete pods in two namespaces during the ``with`` statement. The quota of one is always used up."""
    answers = Answers()

    def with_room(stop: Event) -> None:
        while not stop.wait(0.05):
            send(cluster, answers, gated(f"load-{next(_numbers)}", LOAD))

    def without_room(stop: Event) -> None:
        while not stop.wait(0.05):
            fill(cluster, answers)

    with in_threads([*[with_room] * CALLERS, without_room]):
        answers.await_more(20)
        yield answers
        answers.await_more(40)


def send(cluster: Cluster, answers: Answers, manifest: Json) -> None:
    """Create the pod, record the answer, and delete the pod."""
    try:
        answer = cluster.try_create(manifest)
    except HTTPError as error:
        answers.record(NO_ANSWER, str(error))
        return
    answers.record(str(answer.status), answer.message)
    if answer.status == HTTPStatus.CREATED:
        discard(cluster, manifest)


def fill(cluster: Cluster, answers: Answers) -> None:
    """Create pods until the quota rejects one. Record how many are stored, and delete one of them.

    An answer that is no rejection by the quota is recorded.
    """
    try:
        manifest = gated(f"tight-{next(_numbers)}", TIGHT)
        answer = cluster.try_create(manifest)
        stored = cluster.pods(TIGHT)
    except HTTPError:
        return
    answers.most = max(answers.most, len(stored))
    if answer.status != HTTPStatus.CREATED and not answer.is_over_quota:
        answers.record(str(answer.status), answer.message)
    if answer.status == HTTPStatus.FORBIDDEN and stored:
        discard(cluster, stored[0])


def discard(cluster: Cluster, manifest: Json) -> None:
    """Delete a pod without waiting. If the API server does not answer, the pod stays until the next test."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    try:
        cluster.rest.send("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0})
    except HTTPError:
        return
