"""Tests of creates with generateName.

If a generated name is already in use, the charge of that attempt stays until the controller releases it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, controlling
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.ledgers import await_committed
from tests.integration.reviews import card_pod, gpu_pod

TAKEN = 2
FIRST_MINOR_THAT_RETRIES = 31
"""The first minor version of Kubernetes that repeats a create with generateName up to eight times.

Each attempt has a new name and uid.
"""


def test_a_generated_name_in_use_leaves_a_charge_until_the_controller_releases_it(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    """Before the release, a rejection states the number of pending cards."""
    retries = cluster.control_plane.minor >= FIRST_MINOR_THAT_RETRIES
    namespace = team({"quota": {"M40": 4}})
    generated = {"namespace": namespace, "generateName": "train-", "labels": {LABEL: "true"}}
    with squatting(cluster, installation.ca.parent, TAKEN) as squatter:
        answer = cluster.try_create({**card_pod("", namespace), "metadata": generated})
    assert answer.status == (HTTPStatus.CREATED if retries else HTTPStatus.CONFLICT), answer.message
    tries = TAKEN + 1 if retries else 1
    assert len(set(squatter.uids)) == len(squatter.uids) == tries
    assert installation.ledger(namespace).pending.keys() == set(squatter.uids)

    # This pod fits only after the release of the charges whose pods were not stored.
    cards = 4 - retries
    refused = cluster.try_create(card_pod("next", namespace, cards=cards))
    assert (refused.status, "Retry-After" in refused.headers) == (HTTPStatus.TOO_MANY_REQUESTS, False)
    assert f"requested: {cards} cards, used: {tries} ({tries} pending), limited: 4" in refused.message
    assert refused.message.endswith("admitted pods that were never created release their quota within 75 s")

    with controlling(installation) as controller:
        await_committed(installation, namespace, **({"M40": 100} if retries else {}))
        told = controller.logs("releasing the charge of an unstored pod")
        # The controller's log has lines about the ledgers of other tests too, so only lines of this namespace count.
        vain = {line["uid"] for line in told if line["namespace"] == namespace}
        assert vain == set(squatter.uids[:TAKEN])
    assert cluster.try_create(card_pod("next", namespace, cards=3)).status == HTTPStatus.CREATED


LABEL = "e2e.vcuda.io/squatted"
"""A `Squatter` reviews the pods that have this label."""


@dataclass
class Squatter:
    """A webhook that creates other pods with the names of the first ``limit`` pods that it reviews.

    So the API server finds these names in use when it wants to store the reviewed pods.

    ``uids``: the uids of all reviewed pods, in order.
    """

    cluster: Cluster
    limit: int
    uids: list[str] = field(default_factory=list)

    def answer(self, _path: str, review: Json) -> Json:
        request = review["request"]
        self.uids.append(request["object"]["metadata"]["uid"])
        if len(self.uids) <= self.limit:
            self.cluster.create(gpu_pod(request["name"], request["namespace"], {"cpu": "1"}))
        return reviewed(review)


@contextmanager
def squatting(cluster: Cluster, certificates: Path, limit: int) -> Iterator[Squatter]:
    """Run a `Squatter` that reviews the pods with the label `LABEL`.

    ``certificates``: the directory of ca.crt, tls.crt and tls.key.
    """
    squatter = Squatter(cluster, limit)
    with answering(squatter.answer, certificates) as url:
        hook = asks_about_pods("squatter.example.com", url, certificates, LABEL)
        with cluster.register_webhooks(validating=[hook]):
            yield squatter
