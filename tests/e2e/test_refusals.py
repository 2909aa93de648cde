"""Tests of refusals. The answer is 403 only if the stored objects use up the quota.

If the ledger still counts deleted pods, the answer is 429, because their charges are released soon.
"""

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.integration.reviews import card_pod

CARDS = 3
ROUNDS = 10


def test_a_pod_created_right_after_a_deletion_is_never_rejected_with_403(
    cluster: Cluster, led_team: Callable[[Json], str]
) -> None:
    namespace = led_team({"quota": {"M40": CARDS}})
    for number in range(CARDS):
        cluster.create(card_pod(f"train-{number}", namespace))
    statuses = set()
    for number in range(ROUNDS):
        cluster.delete_pod(namespace, f"train-{number}")
        new = card_pod(f"train-{number + CARDS}", namespace)
        while (answer := cluster.try_create(new)).status != HTTPStatus.CREATED:
            statuses.add(answer.status)
    assert statuses <= {HTTPStatus.TOO_MANY_REQUESTS}
    assert len(cluster.pods(namespace)) == CARDS
