"""Tests of deleted pods that may still run. They stay charged, even if the leader changes.

After the deletion of a namespace, none of its data remains.
"""

from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation, await_enforced, controlling, tenant_of
from tests.e2e.ledgers import await_committed, await_ledger, await_ledger_gone, await_published
from tests.integration.reviews import card_pod, with_spec
from tests.processes import eventually
from vcuda.ledger.ledger import Terminating
from vcuda.quota.model import Charge
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS

FOUR = Charge(400, 0, 400)


def test_a_pod_deleted_by_force_stays_charged_for_its_grace_period_under_every_leader(
    cluster: Cluster, installation: Installation, m40: str
) -> None:
    """The leader's flag --max-terminating-seconds limits how long a pod with a longer grace period stays charged."""
    with installation.team({"quota": {"M40": 4}}) as team, tenant_of(cluster, team) as tenant:
        long = with_spec(card_pod("long", team, cards=4), terminationGracePeriodSeconds=MAX_TERMINATING_SECONDS)
        with controlling(installation, "--max-terminating-seconds", "500") as leader:
            cluster.bind(long, m40)
            await_committed(installation, team, M40=400)
            tenant.delete_by_force(team, "long")
            ledger = await_ledger(installation, team, lambda ledger: bool(ledger.terminating))
            assert [*ledger.terminating.values()] == [Terminating("M40", FOUR, 500)]
            answer = tenant.try_create(card_pod("next", team))
            assert answer.status == HTTPStatus.FORBIDDEN
            assert "used: 4 (0 pending, 4 terminating), limited: 4, 1 more needed" in answer.message
            report = await_published(cluster, team, lambda report: report["models"][0]["terminating"])
            assert (report["models"][0]["used"], report["models"][0]["terminating"]) == (4, 4)
            assert leader.metric("vcuda_quota_terminating_cards", namespace=team) == 4
            leader.kill()
        with controlling(installation, "--max-terminating-seconds", "3") as successor:
            assert tenant.try_create(card_pod("next", team)).status == HTTPStatus.FORBIDDEN
            await_ledger(installation, team, lambda ledger: not ledger.terminating)
            successor.await_log("releasing the charge of a pod deleted before it ended")
            tenant.create(card_pod("next", team, cards=4))


@pytest.mark.usefixtures("controller_manager")
def test_a_deleted_namespace_leaves_no_ledger_report_or_series(cluster: Cluster, installation: Installation) -> None:
    """The entry "*" of the quota would also limit a new namespace with the same name."""
    with controlling(installation) as controller, installation.quota.limited(**{"*": {"quota": {"M40": 4}}}):
        with installation.free_team() as namespace:
            await_enforced(cluster, namespace)
            cluster.create(card_pod("train", namespace))
            await_committed(installation, namespace, M40=100)
            await_published(cluster, namespace)
            assert controller.samples("vcuda_quota_limit_cards", namespace=namespace) == [4]
        cluster.delete_namespace(namespace)
        cluster.await_gone("/api/v1/namespaces", namespace)
        await_ledger_gone(cluster, namespace)
        eventually(lambda: not controller.samples("vcuda_quota_limit_cards", namespace=namespace), controller.output)
