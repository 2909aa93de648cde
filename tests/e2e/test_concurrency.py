"""Many creators at once, through two replicas that know nothing of each other: never one card too many."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import REPLICA, installed
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod

ONE_CARD = {"tencent.com/vcuda-core": "100"}
PODS = 200
THREADS = 16
CARDS = 50
REPLICAS = 2
TRIES = 20


def create_as_client_go_does(cluster: Cluster, pod: Json) -> list[Answer]:
    """Every answer to the pod's creation, the last one final: a 429 that says when to come again is obeyed."""
    answers = [cluster.try_create(pod)]
    while "Retry-After" in answers[-1].headers and len(answers) < TRIES:
        time.sleep(float(answers[-1].headers["Retry-After"]))
        answers.append(cluster.try_create(pod))
    return answers


def test_no_more_pods_are_stored_than_there_are_cards(cluster: Cluster, tmp_path: Path) -> None:
    with installed(cluster, tmp_path, replicas=REPLICAS) as own, own.team({"quota": {"M40": CARDS}}) as namespace:
        pods = [
            gpu_pod(f"train-{number}", namespace, ONE_CARD, labels={REPLICA: str(number % REPLICAS)})
            for number in range(PODS)
        ]
        with ThreadPoolExecutor(THREADS) as threads:
            tries = list(threads.map(lambda pod: create_as_client_go_does(cluster, pod), pods))
        stored = cluster.pods(namespace)

        assert len(stored) == CARDS
        statuses = Counter(answers[-1].status for answers in tries)
        # By 429 as long as pods of others were on their way, and might yet have been refused.
        assert (statuses[201], statuses[403] + statuses[429]) == (CARDS, PODS - CARDS)
        over = f"exceeded GPU quota: M40 in namespace {namespace}, requested: 1 card, used: {CARDS} ("
        messages = {answers[-1].message for answers in tries if answers[-1].message}
        assert [message for message in messages if over not in message] == []
        assert own.ledger(namespace).pending.keys() == {pod["metadata"]["uid"] for pod in stored}
        assert all(replica.metric("vcuda_admissions_total", outcome="charged") for replica in own.replicas)
