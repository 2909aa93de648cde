"""Tests of a user with ClusterRole `edit` who tries to bypass the quota. The attempts need a whole control plane."""

from collections.abc import Callable
from http import HTTPStatus

import pytest

from tests.builders import MODEL, held_to
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_enforced, tenant_of
from tests.e2e.ledgers import await_committed, await_published
from tests.integration.reviews import card_pod, with_spec
from tests.processes import ControllerProcess
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS as LONGEST

UNGATED = {"spec": {"schedulingGates": None}}


def gated(name: str, namespace: str, **spec: object) -> Json:
    return with_spec(card_pod(name, namespace), schedulingGates=[{"name": "example.com/wait"}], **spec)


def patch(user: Cluster, namespace: str, name: str, change: Json) -> int:
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    return user.rest.try_merge_patch(path, change).status


@pytest.mark.usefixtures("scheduler")
def test_gated_pods_created_before_the_limit_are_counted_by_their_node_selection_or_node(
    cluster: Cluster, installation: Installation, controller: ControllerProcess, m40: str
) -> None:
    """The API server calls no webhook when the gates are removed. So the controller must count such pods."""
    with installation.free_team() as team, tenant_of(cluster, team) as tenant:
        await_enforced(cluster, team, enforced=False)
        tenant.create(gated("open", team))
        tenant.create(gated("narrowed", team))
        tenant.create(gated("held", team, nodeSelector={MODEL: "P100"}))
        with installation.quota.limited(**{team: {"quota": {"M40": 2, "P100": 0}}}):
            await_enforced(cluster, team)
            await_committed(installation, team, P100=100)
            await_published(cluster, team, lambda report: report["unpinned"] == ["narrowed", "open"])
            assert patch(tenant, team, "narrowed", {"spec": {"nodeSelector": {MODEL: "M40"}}}) == HTTPStatus.OK
            await_committed(installation, team, M40=100, P100=100)
            assert patch(tenant, team, "open", UNGATED) == HTTPStatus.OK
            assert cluster.await_bound(team, "open")["spec"]["nodeName"] == m40
            await_committed(installation, team, M40=200, P100=100)
            assert tenant.try_create(card_pod("next", team)).is_over_quota
        assert controller.process.poll() is None


def test_a_charged_pod_cannot_change_its_model_by_scheduling_gates(
    cluster: Cluster, team: Callable[[Json], str]
) -> None:
    """The API server rejects any change of a gated pod's node selection by which the pod could run on other nodes."""
    namespace = team({"quota": {"M40": 1}})
    with tenant_of(cluster, namespace) as tenant:
        tenant.create(gated("train", namespace))
        for affinity in (held_to("P100"), None):
            change = {"spec": {"affinity": affinity}}
            assert patch(tenant, namespace, "train", change) == HTTPStatus.UNPROCESSABLE_ENTITY
        assert tenant.try_create(gated("next", namespace)).is_over_quota


def test_a_pods_own_deadline_or_grace_period_releases_no_quota_while_it_runs(
    cluster: Cluster, installation: Installation, led_team: Callable[[Json], str], m40: str
) -> None:
    """Only the kubelet reports that a pod has ended. Until then, the pod stays charged."""
    namespace = led_team({"quota": {"M40": 1}})
    cluster.bind(with_spec(card_pod("train", namespace), terminationGracePeriodSeconds=LONGEST), m40)
    with tenant_of(cluster, namespace) as tenant:
        path = f"/api/v1/namespaces/{namespace}/pods/train"
        failed = {"status": {"phase": "Failed"}}
        status = tenant.rest.try_merge_patch(f"{path}/status", failed)
        assert (status.status, "pods/status" in status.message) == (HTTPStatus.FORBIDDEN, True)
        # The API server ignores the status in a patch of the pod. Only a patch of the subresource `status` changes it.
        patch(tenant, namespace, "train", failed)
        assert patch(tenant, namespace, "train", {"spec": {"activeDeadlineSeconds": 1}}) == HTTPStatus.OK
        tenant.rest.send("DELETE", path, {"gracePeriodSeconds": LONGEST}).ok()
        going = cluster.pod(namespace)
        assert (going["metadata"]["deletionGracePeriodSeconds"], going["status"]["phase"]) == (
            LONGEST,
            "Pending",
        )
        await_committed(installation, namespace, M40=100)
        assert tenant.try_create(card_pod("next", namespace)).is_over_quota
    cluster.delete_pod(namespace, "train")
