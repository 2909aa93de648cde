"""Tests of creates with generateName.

If a generated name is in use, the attempt leaves a charge, which the controller releases later.
"""

from collections.abc import Callable
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, controlling
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.ledgers import await_committed
from tests.integration.reviews import card_pod, gpu_pod
from tests.processes import eventually

TAKEN = 2
LABEL = "e2e.vcuda.io/squatted"
FIRST_MINOR_THAT_RETRIES = 31
"""The first minor version of Kubernetes that repeats a create with generateName up to eight times.

Each attempt has a new name and uid.
"""


def test_a_generated_name_in_use_leaves_a_charge_until_the_controller_releases_it(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str]
) -> None:
    """Until the release, rejections state the number of pending cards."""
    retries = cluster.control_plane.minor >= FIRST_MINOR_THAT_RETRIES
    namespace = team({"quota": {"M40": 4}})
    generated = {"namespace": namespace, "generateName": "train-", "labels": {LABEL: "true"}}
    uids: list[str] = []

    def squat(_path: str, review: Json) -> Json:
        """Create other pods with the first names that are reviewed, so that the API server finds these names in use."""
        request = review["request"]
        uids.append(request["object"]["metadata"]["uid"])
        if len(uids) <= TAKEN:
            cluster.create(gpu_pod(request["name"], request["namespace"], {"cpu": "1"}))
        return reviewed(review)

    certificates = installation.ca.parent
    with answering(squat, certificates) as url:
        squatter = asks_about_pods("squatter.example.com", url, certificates, LABEL)
        with cluster.register_webhooks(validating=[squatter]):
            answer = cluster.try_create({**card_pod("", namespace), "metadata": generated})
    assert answer.status == (HTTPStatus.CREATED if retries else HTTPStatus.CONFLICT), answer.message
    tries = TAKEN + 1 if retries else 1
    assert len(set(uids)) == len(uids) == tries
    assert installation.ledger(namespace).pending.keys() == set(uids)

    # This pod fits only after the charges of pods that were never stored are released.
    cards = 4 - retries
    rejected = cluster.try_create(card_pod("next", namespace, cards=cards))
    assert (rejected.status, "Retry-After" in rejected.headers) == (HTTPStatus.FORBIDDEN, False)
    assert f"requested: {cards} cards, used: {tries} ({tries} pending), limited: 4" in rejected.message
    assert "quota of admitted pods that were never created is being released within 75 s" in rejected.message

    with controlling(installation) as controller:
        await_committed(installation, namespace, **({"M40": 100} if retries else {}))

        def vain() -> set[str]:
            # The controller also logs the ledgers of other tests, so only lines of this namespace count.
            told = controller.logs("releasing the charge of an unstored pod")
            return {line["uid"] for line in told if line["namespace"] == namespace}

        eventually(lambda: vain() == set(uids[:TAKEN]), controller.output)
    assert cluster.try_create(card_pod("next", namespace, cards=3)).status == HTTPStatus.CREATED
