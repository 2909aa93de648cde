"""Puts the webhook together: on a cluster, or on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from vcuda import kube as k8s
from vcuda.placement.affinity import Hints
from vcuda.placement.placement import Nodes
from vcuda.quota.model import SYSTEM_NAMESPACES
from vcuda.tls import ServingCertificate
from webhook.admission import Gate, Service
from webhook.context import ClusterPolicy, PolicySnapshot, read_nodes, read_quota
from webhook.ledger_client import KUBE_THREADS, ClusterLedgers
from webhook.ledgers import MemoryLedgers
from webhook.metrics import LedgerMetrics, Metrics, ReflectorCollector

MakeService = Callable[[ServingCertificate], Service]


class Cluster(msgspec.Struct, frozen=True):
    """How to reach the cluster, and where things are in it.

    ``end`` prints an error and ends the webhook; it is called in the worker where Kubernetes is too old.
    """

    kubeconfig: Path | None
    place: k8s.QuotaPlace
    system_namespace: str
    hints: Hints
    end: Callable[[str], None] = k8s.end_process

    def check(self) -> None:
        """Read the credentials once before anything is started; nothing is sent.

        Raises:
            BadInput: they cannot be read.

        """
        k8s.Kube.connect(self.kubeconfig).close()

    def make_service(self, certificate: ServingCertificate) -> Service:
        """Return a service that watches the quota and the nodes, and keeps ledgers in ConfigMaps."""
        check = k8s.VersionCheck(structlog.get_logger().warning, self.end)
        # A connection for each thread of the ledgers, so that none of them waits for another's, and two to spare.
        kube = k8s.Kube.connect(self.kubeconfig, pool_size=KUBE_THREADS + 2, version_check=check)
        quota = k8s.QuotaInformer(kube, self.place, SYSTEM_NAMESPACES | {self.system_namespace})
        nodes = k8s.NodeInformer(kube, self.hints.labels)
        policy = ClusterPolicy(quota, nodes, k8s.FreeCardsInformer(kube, self.system_namespace), self.hints)
        metrics = _metrics(certificate)
        store = k8s.LedgerStore(kube, self.system_namespace, nodes.current)
        ledgers = ClusterLedgers(store, LedgerMetrics(metrics.registry))
        metrics.watch("vcuda_quota_config_valid", "0 while the document in the cluster is malformed.", quota.is_valid)
        metrics.registry.register(ReflectorCollector(policy.reflectors()))
        policy.start()
        return Service(policy.current, ledgers, metrics, Gate(), structlog.get_logger(), self.place)


class Standalone(msgspec.Struct, frozen=True):
    """A quota and nodes from files, and ledgers in memory: every namespace counts as enforced."""

    quota: Path
    nodes: Path | None
    hints: Hints

    def policy(self) -> PolicySnapshot:
        """Read the files; BadInput where one of them cannot be read, or has faults."""
        labels = self.hints.labels
        nodes = read_nodes(self.nodes, labels) if self.nodes else Nodes(labels)
        return PolicySnapshot(read_quota(self.quota), nodes, self.hints)

    def make_service(self, certificate: ServingCertificate) -> Service:
        """Return a service that answers from the files alone."""
        metrics, policy = _metrics(certificate), self.policy()
        metrics.watch("vcuda_quota_config_valid", "1 while the document is in force.", lambda: 1)
        return Service(lambda: policy, MemoryLedgers(), metrics, Gate(), structlog.get_logger())


def _metrics(certificate: ServingCertificate) -> Metrics:
    metrics = Metrics()
    metrics.watch(
        "vcuda_serving_certificate_expiry_seconds",
        "When the serving certificate expires, in Unix seconds.",
        lambda: certificate.expiry,
    )
    metrics.count(
        "vcuda_serving_certificate_reload_failures",
        "Bad certificate pairs met since the start; the last good one was kept.",
        lambda: certificate.reload_failures,
    )
    return metrics
