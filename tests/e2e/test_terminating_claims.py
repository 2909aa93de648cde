"""Tests of a pod with a claim that is deleted by force. Its containers may still use the devices of the claim.

The devices stay charged for the grace period of the pod.
"""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import NVIDIA, Published, card, claim, claiming, claims, claims_path, dra_cluster, template
from tests.e2e.installation import Installation, controlling, installed, limited_team, tenant_of
from tests.e2e.ledgers import await_committed, await_ledger
from tests.integration.reviews import with_spec
from tests.processes import eventually
from vcuda.ledger.ledger import MIN_TERMINATING_SECONDS, Ledger, Terminating
from vcuda.quota.model import Charge

GRACE = 500
BOUND = ("--max-terminating-seconds", "600")
ONE = Charge(100, 0, 100)


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cards = Published(NVIDIA, "a100-1", [card(number, "A100") for number in range(4)])
    with dra_cluster(assets, tmp_path_factory.mktemp("claims"), cards) as running:
        yield running


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture
def team(installation: Installation) -> Iterator[str]:
    with limited_team(installation, {"quota": {"A100": 1}}) as name:
        yield name


def training(team: str, name: str, grace: int = GRACE) -> Json:
    pod = claiming(team, name, resourceClaimTemplateName="gpu")
    return with_spec(pod, terminationGracePeriodSeconds=grace)


def start(cluster: Cluster, installation: Installation, pod: Json) -> None:
    """Create a pod. Wait until its claim has a device, which is charged, and until the pod is bound."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    cluster.create(pod)
    cluster.await_bound(namespace, name)
    cluster.set_pod_status(namespace, name, {"phase": "Running"})
    await_committed(installation, namespace, A100=100)


def delete_by_force(cluster: Cluster, namespace: str, name: str) -> None:
    """As an administrator, delete a running pod with a grace period of 0. Wait until its claim is deleted."""
    [held] = claims(cluster, namespace)
    cluster.delete_by_force(namespace, name)
    cluster.await_gone(claims_path(namespace), held["metadata"]["name"])


def is_rejected(tenant: Cluster, team: str) -> bool:
    answer = tenant.try_create(claim(team, "another"), dryRun="All")
    return answer.status == HTTPStatus.FORBIDDEN and "exceeded quota" in answer.message


def held(ledger: Ledger) -> list[Terminating]:
    return [*ledger.terminating.values()]


def test_the_card_of_a_running_pod_deleted_by_force_is_not_free_for_the_grace_period(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """The leader's flag --max-terminating-seconds limits how long the card stays charged."""
    with tenant_of(cluster, team) as tenant:
        tenant.create(template(team, "gpu"))
        with controlling(installation, *BOUND) as leader:
            start(cluster, installation, training(team, "one"))
            delete_by_force(cluster, team, "one")
            assert is_rejected(tenant, team)
            ledger = await_ledger(installation, team, lambda ledger: bool(ledger.terminating))
            assert (held(ledger), ledger.claimed) == ([Terminating("A100", ONE, GRACE)], {})
            assert is_rejected(tenant, team)
            leader.kill()
        with controlling(installation, "--max-terminating-seconds", "3"):
            await_ledger(installation, team, lambda ledger: not ledger.terminating)
            eventually(lambda: not is_rejected(tenant, team))


def test_the_card_of_an_ended_pod_is_released_at_once_and_after_a_forced_deletion_later(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    with tenant_of(cluster, team) as tenant, controlling(installation, *BOUND):
        tenant.create(template(team, "gpu"))
        start(cluster, installation, training(team, "one"))
        cluster.delete_pod(team, "one")
        ledger = await_ledger(installation, team, lambda ledger: not ledger.claimed)
        assert not ledger.terminating
        start(cluster, installation, training(team, "two", grace=0))
        delete_by_force(cluster, team, "two")
        ledger = await_ledger(installation, team, lambda ledger: bool(ledger.terminating))
        assert held(ledger) == [Terminating("A100", ONE, MIN_TERMINATING_SECONDS)]
        await_ledger(installation, team, lambda ledger: not ledger.terminating)
