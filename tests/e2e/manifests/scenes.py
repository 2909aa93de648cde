"""Steps of a test, called scenes. Together they need all RBAC rights of the controller, and no scene is redundant."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path

from controller.certificates import REASON
from tests.e2e import installation, ledgers
from tests.e2e.cluster import Cluster, Json
from tests.e2e.json_server import tls
from tests.e2e.manifests.system import NODE, System
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.second_scheduler import NAME as SCHEDULER
from tests.e2e.stage import CORE, SERVICE, SLICES, own_address
from tests.e2e.stale_objects import Allocated, await_freed, await_removal_event, is_allocated
from tests.e2e.workloads import check_retried
from tests.integration.reviews import card_pod, with_spec
from tests.integration.tls_echo import echoing
from tests.processes import ControllerProcess, WebhookProcess
from tools.control_plane import ControlPlane
from vcuda.kube.endpoints import MANAGED_BY, SERVICE_NAME
from vcuda.ledger.text import read_ledger
from vcuda.requests.schemes import GPU_MANAGER

EXTENDER_JOB = "vcuda-extender-certs-first"
SCHEDULER_JOB = "vcuda-scheduler-certs-first"
CARDS = {"tencent.com/vcuda-core": "1600", "tencent.com/vcuda-memory": "1024"}
LEAVING = "gpu-leaving"
JOURNAL = f"gpu-placements.{LEAVING}"
LOCK = "hami.io/mutex.lock"
LONG_AGO = "2020-01-01T00:00:00Z"


def quota_of(cluster: Cluster, webhook: WebhookProcess) -> QuotaConfigMap:
    return QuotaConfigMap(cluster.rest, "kube-system", "gpuquota", readers=[webhook])


@contextmanager
def limited(cluster: Cluster, quota: QuotaConfigMap, entry: Json) -> Iterator[str]:
    """Limit a new namespace by this quota entry during the ``with`` statement, and then delete the namespace.

    The entry is added only after the controller has labelled the namespace as exempt.
    """
    namespace = cluster.create_namespace()
    installation.await_enforced(cluster, namespace, enforced=False)
    with quota.limited(**{namespace: entry}):
        installation.await_enforced(cluster, namespace)
        yield namespace
    installation.await_enforced(cluster, namespace, enforced=False)
    ledgers.await_unpublished(cluster, namespace)
    cluster.delete_namespace(namespace)


def a_namespace_is_led_through_its_life(cluster: Cluster, quota: QuotaConfigMap) -> None:
    """The controller does all its work for a namespace, from the first label to the deletion of the ledger.

    It labels the namespace, and recounts the ledger after a pod was charged. It releases a charge whose pod was never
    stored, and publishes the usage. At last it deletes the ledger and the usage report.
    """
    with limited(cluster, quota, {"quota": {"M40": 2}}) as namespace:
        cluster.create(card_pod("train", namespace))
        ledger = installation.LEDGERS, f"gpu-ledger-{namespace}"
        cluster.await_object(*ledger, lambda found: not pending(found))
        assert cluster.try_create(card_pod("train", namespace)).status == HTTPStatus.CONFLICT
        cluster.await_object(*ledger, pending)
        cluster.await_object(*ledger, lambda found: not pending(found))
        ledgers.await_published(cluster, namespace)
        cluster.create(card_pod("second", namespace))
    ledgers.await_ledger_gone(cluster, namespace)


def two_namespaces_share_the_quota_of_a_team(cluster: Cluster, quota: QuotaConfigMap) -> None:
    """The webhook lists the ledgers of the team when it opens the ledger of the team."""
    members = [cluster.create_namespace() for _ in range(2)]
    for namespace in members:
        installation.await_enforced(cluster, namespace, enforced=False)
    replace(quota, further={"gpu_teams": json.dumps({"vision": {"namespaces": members, "quota": {"M40": 1}}})}).limit()
    for namespace in members:
        installation.await_enforced(cluster, namespace)
    cluster.create(card_pod("train", members[0]))
    assert cluster.try_create(card_pod("train", members[1])).status == HTTPStatus.FORBIDDEN
    quota.limit()
    for namespace in members:
        installation.await_enforced(cluster, namespace, enforced=False)
        ledgers.await_unpublished(cluster, namespace)
        cluster.delete_namespace(namespace)


def pending(ledger: Json) -> bool:
    return bool(read_ledger(ledger["data"]["ledger"]).pending)


def a_pod_from_before_the_quota_is_told_that_it_is_not_counted(cluster: Cluster, quota: QuotaConfigMap) -> None:
    """A quota is added to a namespace that already has two pods: one runs on a node, and the other has no node.

    The running pod is counted, so the namespace gets a ledger. An Event reports that the waiting pod is not counted.
    """
    namespace = cluster.create_namespace()
    cluster.create(with_spec(card_pod("runs", namespace), nodeName=NODE))
    cluster.create(card_pod("waits", namespace))
    with quota.limited(**{namespace: {"quota": {"M40": 1}}}):
        cluster.await_events(namespace, "involvedObject.name=waits")
        cluster.await_object(installation.LEDGERS, f"gpu-ledger-{namespace}", lambda _: True)
    cluster.delete_namespace(namespace)


def stale_allocations_are_removed(cluster: Cluster) -> None:
    """The controller removes an allocation from a pod that was never bound, and a stale lock of HAMi from a node.

    An Event reports each removal.
    """
    namespace = cluster.create_namespace()
    pod = Allocated("stale", GPU_MANAGER, "gone-node")
    pod.create(cluster, namespace)
    await_freed(cluster, namespace, pod)
    await_removal_event(cluster, namespace, pod.name)
    cluster.rest.merge_patch(f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": {LOCK: LONG_AGO}}})
    cluster.await_object("/api/v1/nodes", NODE, lambda found: LOCK not in found["metadata"].get("annotations", {}))
    await_removal_event(cluster, "default", NODE)
    cluster.delete_namespace(namespace)


def every_kind_of_workload_tries_again(cluster: Cluster, plane: ControlPlane, quota: QuotaConfigMap) -> None:
    with limited(cluster, quota, {"quota": {"M40": 5}}) as namespace:
        cluster.create(card_pod("holder", namespace, cards=5))
        check_retried(cluster, plane.controller_manager, namespace, lambda: cluster.delete_pod(namespace, "holder"))


def a_malformed_quota_is_reported(cluster: Cluster, quota: QuotaConfigMap) -> None:
    """Each part of the system that reads a malformed quota reports it by an Event.

    Here the ConfigMap has no label, so /quota does not check the edit.
    """
    good = quota.document()
    cluster.rest.merge_patch(quota.path, {"metadata": {"labels": None}})
    bad = QuotaConfigMap(cluster.rest, quota.namespace, quota.name, labels={})
    uid = bad.write("{team-a: 8}").ok()["metadata"]["uid"]
    cluster.await_events(quota.namespace, f"involvedObject.uid={uid}")
    quota.limit_anew(**good)


def a_damaged_journal_is_made_anew_once_it_is_deleted_and_goes_with_its_node(
    cluster: Cluster, controller: ControllerProcess
) -> None:
    """A node's journal is damaged. It is the ConfigMap with the extender's placements on the node.

    The controller recreates the journal after its deletion, and deletes the journal with its node. The caller must have
    called `damage_a_journal` before this controller became the leader.
    """
    controller.await_log("placements of a node cannot be read")
    cluster.rest.send("DELETE", f"{CORE}/configmaps/{JOURNAL}").ok()
    cluster.await_object(f"{CORE}/configmaps", JOURNAL, lambda made: made["data"]["placements"] != "{")
    cluster.delete_node(LEAVING)
    cluster.await_gone(f"{CORE}/configmaps", JOURNAL)


def damage_a_journal(cluster: Cluster) -> None:
    cluster.rest.merge_patch(f"{CORE}/configmaps/{JOURNAL}", {"data": {"placements": "{"}})


def a_certificate_that_nobody_renewed_is_told(system: System) -> None:
    with showing_an_old_leaf(system.directory / "old-leaf") as address:
        system.cluster.create(endpoint_slice(address))
        with system.controller():  # the new leader checks the certificates at once
            system.cluster.await_events(installation.SYSTEM_NAMESPACE, f"reason={REASON}")
    system.cluster.rest.send("DELETE", f"{SLICES}/{SERVICE}").ok()


def endpoint_slice(address: str) -> Json:
    host, _, port = address.rpartition(":")
    labels = {SERVICE_NAME: SERVICE, MANAGED_BY: "e2e"}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": SERVICE, "namespace": installation.SYSTEM_NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host]}],
        "ports": [{"name": "https", "port": int(port)}],
    }


def a_pod_is_placed_on_a_card(cluster: Cluster, quota: QuotaConfigMap) -> None:
    with limited(cluster, quota, {"quota": {"M40": 1}}) as namespace:
        placed = place(cluster, namespace, "placed")
        assert placed["spec"]["schedulerName"] == SCHEDULER
        assert is_allocated(placed, GPU_MANAGER)


def place(cluster: Cluster, namespace: str, name: str) -> Json:
    cluster.create(card_pod(name, namespace))
    return cluster.await_bound(namespace, name)


def a_pod_beyond_a_lowered_quota_is_evicted(cluster: Cluster, quota: QuotaConfigMap) -> None:
    """The quota is lowered, so that only one of two pods fits. The controller evicts the newer pod.

    No kubelet runs here, so the evicted pod stays terminating.
    """
    with limited(cluster, quota, {"quota": {"M40": 2}}) as namespace:
        for name in ("a-older", "b-newer"):
            place(cluster, namespace, name)
            cluster.run_pod(namespace, name)
        quota.limit(**{namespace: {"quota": {"M40": 1}}})
        cluster.wait_pod(namespace, "b-newer", lambda found: "deletionTimestamp" in found["metadata"])
        assert "deletionTimestamp" not in cluster.pod(namespace, "a-older")["metadata"]


def the_extenders_certificate_is_renewed(system: System) -> None:
    """The extender's certificate gets another DNS name while the extender runs.

    The extender serves the new certificate after the kubelet has updated the mounted Secret.
    """
    done = system.rotate(EXTENDER_JOB, dns="extender.example.com", timeout="1s")
    assert "IssueLeaf" in done.stdout, done.stdout + done.stderr
    system.mount_extender_certificates()
    done = system.rotate(EXTENDER_JOB, timeout="1m")
    assert done.returncode == 0, done.stdout + done.stderr


def the_schedulers_certificate_is_renewed(system: System) -> None:
    """The scheduler's certificate and its CA are replaced, as after a leak of the key.

    The extender trusts both the old and the new CA at first, and only the new CA at the end.
    """
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    spans = {"overlap": "1s", "retention": "1s", "timeout": "20s"}
    done = system.rotate(SCHEDULER_JOB, issued_before=now, **spans)
    assert "IssueLeaf" in done.stdout, done.stdout + done.stderr


@contextmanager
def showing_an_old_leaf(directory: Path) -> Iterator[str]:
    directory.mkdir()
    installation.make_certificates(directory, datetime.now(UTC) - timedelta(days=100))
    with echoing(lambda: tls(directory), own_address()) as server:
        yield server.address
