"""A ledger that somebody has changed is true to the pods again: at once by its own event, or by the full pass."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import PROMPTLY, STORABLE, Installation, await_committed, controlling, ledger_path, pass_by
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.text import write_ledger
from vcuda.quota.model import Charge

pytestmark = pytest.mark.one_version

SETTLED, MENDED = "vcuda_settle_seconds_count", "vcuda_settle_mended_total"
AHEAD = (50, 150, 450, 1350, 4050)
"""So many writes later the pods that are known are as new as the damaged count says it is, for each try.

A settlement that comes only after these writes mends the ledger without a word. Other tests write as well, and a busy
machine settles late, so the next try gives it more time.
"""

DAMAGES = [pytest.param({"M40": Charge(400, 0, 400)}, id="too high"), pytest.param({}, id="too low")]


@pytest.fixture(scope="module")
def controller(installation: Installation) -> Iterator[ControllerProcess]:
    """The one controller, leading, with full passes as often as may be."""
    with controlling(installation, "--full-pass-seconds", str(2 * STORABLE)) as running:
        yield running


@pytest.fixture
def team(led_team: Callable[[Json], str]) -> str:
    """Without room beside its one pod: what befalls the ledger is looked at at once."""
    return led_team({"quota": {"M40": 1}})


def damage(cluster: Cluster, namespace: str, ledger: Ledger) -> None:
    cluster.rest.merge_patch(ledger_path(namespace), {"data": {"ledger": write_ledger(ledger)}})


def newest_version(cluster: Cluster) -> int:
    return int(cluster.rest.get("/api/v1/namespaces", limit="1")["metadata"]["resourceVersion"])


def let_versions_pass(cluster: Cluster, namespace: str, version: int) -> None:
    """Write until all that is stored is newer than ``version``, the last time a pod of no concern."""
    while newest_version(cluster) <= version:
        path = f"/api/v1/namespaces/{namespace}"
        cluster.rest.merge_patch(path, {"metadata": {"annotations": {"e2e.vcuda.io/written": str(time.monotonic())}}})
    pass_by(cluster, namespace)


@pytest.mark.parametrize("committed", DAMAGES)
def test_a_ledger_that_somebody_changes_is_counted_anew_at_once(
    cluster: Cluster, installation: Installation, team: str, committed: dict[str, Charge]
) -> None:
    cluster.create(card_pod("train", team))
    ledger = await_committed(installation, team, M40=100)
    damage(cluster, team, Ledger(committed, ledger.pod_resource_version))
    await_committed(installation, team, PROMPTLY, M40=100)


@pytest.mark.parametrize("committed", DAMAGES)
def test_a_ledger_that_no_event_mends_is_mended_by_the_full_pass_which_counts_it_and_says_so(
    installation: Installation, controller: ControllerProcess, team: str, namespace: str, committed: dict[str, Charge]
) -> None:
    """It claims to be newer than all pods that are known, so it stands when its event comes; then it is at rest."""
    cluster = installation.cluster
    cluster.create(card_pod("train", team))
    await_committed(installation, team, M40=100)
    before = controller.metric(MENDED)
    for ahead in AHEAD:
        version = newest_version(cluster) + ahead
        settled = controller.metric(SETTLED)
        damage(cluster, team, Ledger(committed, str(version)))
        controller.await_metric(SETTLED, settled + 1)
        let_versions_pass(cluster, namespace, version)
        await_committed(installation, team, M40=100)
        if controller.metric(MENDED) == before + 1:
            break
    assert controller.metric(MENDED) == before + 1
    controller.await_log("ledger differs from the stored pods; settling it", lambda line: line["namespace"] == team)
