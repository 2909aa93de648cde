"""Names that the API server makes up: each that is taken costs a charge, for as long as none can tell it is vain."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster
from tests.e2e.controller_process import await_committed, controlling
from tests.e2e.installation import Installation
from tests.e2e.rest import Json
from tests.e2e.squatting import LABEL, squatting
from tests.integration.reviews import card_pod

TAKEN = 2
FIRST_MINOR_THAT_RETRIES = 31
"""Of Kubernetes: from there on a create with generateName is tried up to eight times, each with a new name and uid."""


def generated(namespace: str) -> Json:
    """A pod of one card whose name the API server makes up."""
    pod = card_pod("", namespace)
    del pod["metadata"]["name"]
    pod["metadata"] |= {"generateName": "train-", "labels": {LABEL: "true"}}
    return pod


def test_each_generated_name_that_is_taken_leaves_a_charge_until_it_is_known_to_be_vain(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    """Meanwhile a refusal says how much of what is used is only pending. Without a controller nothing is released."""
    retries = cluster.control_plane.minor >= FIRST_MINOR_THAT_RETRIES
    namespace = team({"quota": {"M40": 4}})
    with squatting(cluster, installation.ca.parent, TAKEN) as squatter:
        answer = cluster.try_create(generated(namespace))
    assert answer.status == (HTTPStatus.CREATED if retries else HTTPStatus.CONFLICT), answer.message
    tries = TAKEN + 1 if retries else 1
    assert len(set(squatter.uids)) == len(squatter.uids) == tries
    assert installation.ledger(namespace).pending.keys() == set(squatter.uids)

    refused = cluster.try_create(card_pod("next", namespace, cards=4))
    assert refused.status == HTTPStatus.FORBIDDEN
    assert f"requested: 4 cards, used: {tries} ({tries} pending), limited: 4" in refused.message

    with controlling(installation) as controller:
        await_committed(installation, namespace, **({"M40": 100} if retries else {}))
        vain = {line["uid"] for line in controller.logs("charge of a pod that was never stored")}
        assert vain == set(squatter.uids[:TAKEN])
    assert cluster.try_create(card_pod("next", namespace, cards=3)).status == HTTPStatus.CREATED
