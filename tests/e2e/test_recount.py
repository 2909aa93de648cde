"""Tests that the controller keeps the ledger equal to the stored pods.

It releases the charges of ended pods and of pods that were never stored, and no others.
"""

from collections.abc import Callable
from functools import partial
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json, webhook
from tests.e2e.installation import LEDGERS, PROMPTLY, Installation, await_enforced, ledger_path
from tests.e2e.ledgers import await_committed, await_ledger, await_ledger_gone, await_published, await_unpublished
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess

pytestmark = pytest.mark.one_version


@pytest.fixture
def team(led_team: Callable[[Json], str]) -> str:
    return led_team({"quota": {"M40": 4}})


ENDS: dict[str, Callable[[Cluster, str, str], object]] = {
    "deleted": Cluster.delete_pod,
    "Succeeded": lambda cluster, namespace, name: cluster.finish_pod(namespace, name, "Succeeded"),
    "Failed": lambda cluster, namespace, name: cluster.finish_pod(namespace, name, "Failed"),
}


def test_a_ledger_has_no_managed_fields(cluster: Cluster, installation: Installation, team: str) -> None:
    cluster.create(card_pod("train", team))
    await_committed(installation, team, M40=100)
    assert "managedFields" not in cluster.rest.get(ledger_path(team))["metadata"]
    cluster.create(card_pod("second", team))
    assert "managedFields" not in cluster.rest.get(ledger_path(team))["metadata"]


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_charge_is_released_within_five_seconds_of_its_pods_end(
    cluster: Cluster, installation: Installation, team: str, end: Callable[[Cluster, str, str], object]
) -> None:
    for name in ("ends", "stays"):
        cluster.create(card_pod(name, team))
    await_committed(installation, team, M40=200)
    end(cluster, team, "ends")
    await_committed(installation, team, PROMPTLY, M40=100)


def test_a_pod_created_right_after_a_deletion_may_be_retried(cluster: Cluster, team: str) -> None:
    """The ledger still counts the deleted pod, so each rejection says that quota is being released."""
    for number in range(4):
        cluster.create(card_pod(f"train-{number}", team))
    rejections = []
    for number in range(10):
        cluster.delete_pod(team, f"train-{number}")
        new = card_pod(f"train-{number + 4}", team)
        while (answer := cluster.try_create(new)).status != HTTPStatus.CREATED:
            rejections.append(answer)
    assert [answer for answer in rejections if not answer.may_pass_soon] == []
    assert len(cluster.pods(team)) == 4


def test_a_terminating_pod_is_charged_until_it_is_deleted(
    cluster: Cluster, installation: Installation, team: str, m40: str
) -> None:
    """The second pod is created while the first one terminates. So a ledger that has both counts a terminating pod."""
    cluster.bind(card_pod("slow", team, cards=3), m40)
    await_committed(installation, team, M40=300)
    cluster.rest.send("DELETE", f"/api/v1/namespaces/{team}/pods/slow", {"gracePeriodSeconds": 600}).ok()
    [terminating] = cluster.pods(team)
    assert terminating["metadata"]["deletionTimestamp"]
    cluster.create(card_pod("beside", team))
    await_committed(installation, team, M40=400)
    assert cluster.try_create(card_pod("next", team)).is_over_quota

    cluster.delete_pod(team, "slow")
    await_committed(installation, team, PROMPTLY, M40=100)
    cluster.create(card_pod("next", team))


def rejected_by_another_webhook(cluster: Cluster, namespace: str) -> None:
    """Create a pod that our webhook charges, and that another webhook then rejects."""
    label = {"metadata": {"labels": {"e2e.vcuda.io/rejected-later": namespace}}}
    cluster.rest.merge_patch(f"/api/v1/namespaces/{namespace}", label)
    later = webhook("later.example.com", namespaceSelector={"matchLabels": {"e2e.vcuda.io/rejected-later": namespace}})
    with cluster.register_webhooks(validating=[later]):
        assert cluster.try_create(card_pod("never", namespace)).status == HTTPStatus.INTERNAL_SERVER_ERROR


def named_like_another(cluster: Cluster, namespace: str) -> None:
    assert cluster.try_create(card_pod("stays", namespace)).status == HTTPStatus.CONFLICT


@pytest.mark.parametrize("charge_in_vain", [rejected_by_another_webhook, named_like_another])
def test_the_charge_of_a_pod_is_released_when_it_can_no_longer_be_stored(
    cluster: Cluster,
    installation: Installation,
    controller: ControllerProcess,
    team: str,
    charge_in_vain: Callable[[Cluster, str], None],
) -> None:
    """The charge of a stored pod is kept."""
    cluster.create(card_pod("stays", team))
    await_committed(installation, team, M40=100)
    charge_in_vain(cluster, team)
    [uid] = await_ledger(installation, team, lambda ledger: bool(ledger.pending)).pending
    await_committed(installation, team, M40=100)
    proven = controller.await_log("releasing the charge of an unstored pod", lambda line: line["uid"] == uid)
    assert proven["namespace"] == team


def test_the_first_quota_of_a_namespace_counts_the_running_pods(
    cluster: Cluster, installation: Installation, controller: ControllerProcess, m40: str
) -> None:
    """The pods are not pinned, so they are charged to the models of their nodes. Ended pods are not counted."""
    assert controller.process.poll() is None
    with installation.free_team() as namespace:
        await_enforced(cluster, namespace, enforced=False)
        for name in ("one", "two", "ended"):
            cluster.bind(card_pod(name, namespace), m40)
        cluster.finish_pod(namespace, "ended")
        with installation.quota.limited(**{namespace: {"quota": {"M40": 3}}}):
            await_enforced(cluster, namespace)
            await_committed(installation, namespace, M40=200)
            cluster.create(card_pod("three", namespace))
            assert cluster.try_create(card_pod("four", namespace)).is_over_quota


def test_a_removed_quota_removes_all_its_objects_and_may_be_restored(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """A replica remembers the ledger that it wrote last. When the quota is restored, it must read the new ledger."""
    cluster.create(card_pod("train", team))
    await_published(cluster, team)
    installation.quota.lift(team)
    await_enforced(cluster, team, enforced=False)
    await_ledger_gone(cluster, team)
    await_unpublished(cluster, team)
    cluster.create(card_pod("unlimited", team, cards=3))  # without a limit, this pod is neither charged nor pinned

    installation.quota.limit(**{team: {"quota": {"M40": 2}}})
    await_enforced(cluster, team)
    await_committed(installation, team, M40=100)
    cluster.create(card_pod("limited", team))
    assert cluster.try_create(card_pod("over", team)).is_over_quota


def is_another(uid: str, found: Json) -> bool:
    return bool(found["metadata"]["uid"] != uid)


def test_a_deleted_ledger_is_removed_when_nothing_is_pending_and_then_recreated(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """The ledger is created again when none of the pods in the deleted ledger can still be stored."""
    cluster.create(card_pod("stays", team))
    await_committed(installation, team, M40=100)
    for damage in ({}, {"data": {"ledger": "{"}}):
        named_like_another(cluster, team)
        uid = cluster.rest.merge_patch(ledger_path(team), damage)["metadata"]["uid"]
        cluster.delete(ledger_path(team))
        cluster.await_object(LEDGERS, f"gpu-ledger-{team}", partial(is_another, uid))
        await_committed(installation, team, M40=100)
        assert cluster.try_create(card_pod("over", team, cards=8)).is_over_quota


@pytest.mark.usefixtures("controller_manager")
def test_a_recreated_namespace_starts_with_all_its_quota(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    labels = cluster.rest.get(f"/api/v1/namespaces/{team}")["metadata"]["labels"]
    cluster.create(card_pod("train", team, cards=4))
    await_committed(installation, team, M40=400)
    await_published(cluster, team)
    cluster.delete_namespace(team)
    await_committed(installation, team, PROMPTLY)
    cluster.await_gone("/api/v1/namespaces", team)

    cluster.create_namespace(team, labels)
    await_published(cluster, team)
    cluster.create(card_pod("train", team, cards=4))
    assert cluster.try_create(card_pod("over", team)).is_over_quota
    await_committed(installation, team, M40=400)
