"""A 403 is by what is stored; what only the ledger counts puts a pod off, and room that nobody settles is used."""

from collections.abc import Callable
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_committed, controlling, limited_team
from tests.e2e.rest import Answer
from tests.integration.reviews import card_pod
from tests.processes import eventually
from webhook.ledger.recount import SETTLE_SECONDS

CARDS = 3
ROUNDS = 10


@pytest.mark.timeout(180)
def test_without_a_controller_a_pod_that_fits_is_put_off_and_then_admitted(
    cluster: Cluster, installation: Installation
) -> None:
    with limited_team(installation, {"quota": {"M40": CARDS}}) as namespace:
        with controlling(installation):
            for number in range(CARDS):
                cluster.create(card_pod(f"train-{number}", namespace))
            await_committed(installation, namespace, M40=100 * CARDS)
        refused = cluster.try_create(card_pod("next", namespace))
        assert refused.status == HTTPStatus.FORBIDDEN
        assert refused.message.endswith(f"used: {CARDS} (0 pending), limited: {CARDS}, 1 more needed")

        for number in range(CARDS - 1):
            cluster.delete_pod(namespace, f"train-{number}")
        answers: list[Answer] = []

        def is_stored() -> bool:
            answers.append(cluster.try_create(card_pod("next", namespace)))
            return answers[-1].status == HTTPStatus.CREATED

        eventually(is_stored, lambda: answers[-1].message, 2 * SETTLE_SECONDS)
        assert {answer.status for answer in answers[:-1]} == {HTTPStatus.TOO_MANY_REQUESTS}
        why = "what has gone is given back when it is settled"
        assert answers[0].message.endswith(f"used: {CARDS} (0 pending), limited: {CARDS}, 1 more needed; {why}")
        assert (answers[0].headers.get("Retry-After"), answers[-2].headers.get("Retry-After")) == ("1", None)
        assert cluster.try_create(card_pod("one-more", namespace)).status == HTTPStatus.CREATED
        full = cluster.try_create(card_pod("too-many", namespace))
        assert (full.status, len(cluster.pods(namespace))) == (HTTPStatus.FORBIDDEN, CARDS)


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
