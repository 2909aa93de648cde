"""A 403 is by what is stored; what only the ledger counts puts a pod off, and room that nobody settles is used."""

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.integration.reviews import card_pod

CARDS = 3
ROUNDS = 10


def test_who_comes_right_after_another_has_gone_is_never_told_that_the_quota_is_full(
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
