"""Callers that create pods concurrently through several webhook replicas, and count the answers."""

import re
import threading
from collections import Counter
from collections.abc import Iterable
from http import HTTPStatus
from itertools import count

from tests.e2e.cluster import Cluster
from tests.e2e.installation import REPLICA
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod
from tests.processes import eventually
from vcuda.k8s_types import parse_whole

SPENT = "vcuda_ledger_spent_total"
REAPED = "releasing the reservation of a replica that has ended"
PAUSE_SECONDS = 0.05
VARIES = r"\be2e-\w+|\btrain-\d+|\b\d+(\.\d+)?\b"
"""The parts of a message that differ between rejections for the same reason: names of a test, and numbers."""


class Crowd:
    """Creates pods with unique names in a namespace. The replicas in ``in_service`` (numbers) review them in turn.

    ``answers``: the number of answers with each HTTP status. ``failures``: the messages of all other answers, except
    rejections that end soon. ``reasons``: the number of all rejections by status and message, without its numbers.
    """

    def __init__(self, cluster: Cluster, namespace: str, replicas: Iterable[int]) -> None:
        self.in_service = list(replicas)
        self.answers: Counter[int] = Counter()
        self.failures: list[str] = []
        self.reasons: Counter[str] = Counter()
        self._cluster = cluster
        self._namespace = namespace
        self._numbers = count()

    def create(self, cards: int = 1) -> Answer:
        number = next(self._numbers)
        replica = self.in_service[number % len(self.in_service)]
        limits = {"tencent.com/vcuda-core": 100 * cards}
        pod = gpu_pod(f"train-{number}", self._namespace, limits, labels={REPLICA: str(replica)})
        answer = self._cluster.try_create(pod)
        self.answers[answer.status] += 1
        if answer.status != HTTPStatus.CREATED:
            self.reasons[f"{answer.status} {re.sub(VARIES, '…', answer.message)}"] += 1
        if answer.status != HTTPStatus.CREATED and not answer.may_pass_soon:
            self.failures.append(answer.message)
        return answer

    def create_many(self, stop: threading.Event) -> None:
        while not stop.wait(PAUSE_SECONDS):
            self.create()

    def create_until_rejected(self, cards: int = 1) -> None:
        """Create pods until stored pods use up the quota. Retry a create that may succeed soon."""

        def rejected() -> bool:
            while (answer := self.create(cards)).status == HTTPStatus.CREATED:
                pass
            return answer.status == HTTPStatus.FORBIDDEN and not answer.may_pass_soon

        eventually(rejected, lambda: self.answers)

    def stored_cards(self) -> int:
        limits = (pod["spec"]["containers"][0]["resources"]["limits"] for pod in self._cluster.pods(self._namespace))
        return sum(parse_whole(each["tencent.com/vcuda-core"]) for each in limits) // 100
