"""Many callers that create pods and delete them again, and keep count of what they were answered."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from urllib3.exceptions import HTTPError

from tests.e2e.chaos_policy import ASKS, REFUSAL
from tests.e2e.installation import REPLICA
from tests.e2e.rest import Answer, Json, Rest
from tests.integration.reviews import gpu_pod

STORED = "stored"
OVER_QUOTA = "over quota"
BUSY = "busy, come again (429)"
NOT_PINNED = "not held to a model: /mutate was not reached"
WEBHOOK_AWAY = "webhook not reached"
POLICY = "refused by another policy, after it was charged"
API_AWAY = "API server or etcd not reached"

_REASONS = (
    (OVER_QUOTA, {403}, r"exceeded GPU quota: \w+ in namespace \S+, requested: .* limited: "),
    (NOT_PINNED, {403}, r"held to one GPU model that namespace \S+ may use"),
    (POLICY, {403}, rf"{REFUSAL}$"),
    (BUSY, {429}, r"try again in 1 s$"),
    (WEBHOOK_AWAY, {500}, r"failed calling webhook \"validate(-\d)?\.quota\.vcuda\.io\""),
    (
        API_AWAY,
        {500, 503, 504},
        r"etcd|rpc error|request did not complete|context deadline|context canceled|shut ?down|timed? ?out",
    ),
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
        """Be caller ``number`` until told to stop."""
        labels = {REPLICA: str(number % self.replicas)}
        for turn in itertools.count():
            namespaces = self._namespaces()
            pod = self._pod(f"train-{number}-{turn}", namespaces[number // self.replicas % len(namespaces)], labels)
            answer = self._create(pod)
            with self.lock:
                self.counts[answer] += 1
            if answer in (STORED, API_AWAY):
                stop.wait(random.uniform(0, HOLD))  # noqa: S311  # a load
                self._delete(pod, stop)
            if stop.wait(random.uniform(0, PAUSE)):  # noqa: S311  # a load
                return

    def _pod(self, name: str, namespace: str, labels: Mapping[str, str]) -> Json:
        asks = {ASKS: "true"} if random.random() < SLOW_PART else {}  # noqa: S311  # a load
        return gpu_pod(name, namespace, random.choice(GPU_REQUESTS), labels={**labels, **asks})  # noqa: S311  # a load

    def _namespaces(self) -> Sequence[str]:
        group = int((time.monotonic() - self.started) / self.stay)
        return self.groups[min(group, len(self.groups) - 1)]

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
