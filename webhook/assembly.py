"""Puts the webhook together: on a cluster, or on its own."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from vcuda import kube as k8s
from vcuda import tls
from vcuda.placement import affinity, placement
from vcuda.quota.model import SYSTEM_NAMESPACES
from webhook import admission, context, ledger_client
from webhook.ledgers import MemoryLedgers
from webhook.metrics import LedgerMetrics, Metrics, ReflectorCollector

MakeService = Callable[[tls.ServingCertificate], admission.Service]


class Cluster(msgspec.Struct, frozen=True):
    """How to reach the cluster, and where things are in it.

    ``end`` prints an error and ends the webhook; it is called in the worker where Kubernetes is too old.
    """

    kubeconfig: Path | None
    place: k8s.QuotaPlace
    system_namespace: str
    hints: affinity.Hints
    end: Callable[[str], None] = k8s.end_process

    def check(self) -> None:
        """Read the credentials once before anything is started; nothing is sent.

        Raises:
            BadInput: they cannot be read.

        """
        k8s.Kube.connect(self.kubeconfig).close()

    def make_service(self, certificate: tls.ServingCertificate) -> admission.Service:
        """Return a service that watches the quota and the nodes, and keeps ledgers in ConfigMaps."""
        check = k8s.VersionCheck(structlog.get_logger().warning, self.end)
        # A connection for each thread of the ledgers, so that none of them waits for another's, and two to spare.
        kube = k8s.Kube.connect(self.kubeconfig, pool_size=ledger_client.KUBE_THREADS + 2, version_check=check)
        quota = k8s.QuotaInformer(kube, self.place, SYSTEM_NAMESPACES | {self.system_namespace})
        nodes = k8s.NodeInformer(kube, self.hints.labels)
        policy = context.ClusterPolicy(quota, nodes, k8s.FreeCardsInformer(kube, self.system_namespace), self.hints)
        metrics = _metrics(certificate)
        store = k8s.LedgerStore(kube, self.system_namespace, nodes.current)
        ledgers = ledger_client.ClusterLedgers(store, LedgerMetrics(metrics.registry))
        metrics.watch("vcuda_quota_config_valid", "0 while the document in the cluster is malformed.", quota.is_valid)
        metrics.registry.register(ReflectorCollector(policy.reflectors()))
        policy.start()
        return admission.Service(policy.current, ledgers, metrics, admission.Gate(), structlog.get_logger(), self.place)


class Standalone(msgspec.Struct, frozen=True):
    """A quota and nodes from files, and ledgers in memory: every namespace counts as enforced."""

    quota: Path
    nodes: Path | None
    hints: affinity.Hints

    def policy(self) -> context.PolicySnapshot:
        """Read the files; BadInput where one of them cannot be read, or has faults."""
        labels = self.hints.labels
        nodes = context.read_nodes(self.nodes, labels) if self.nodes else placement.Nodes(labels)
        return context.PolicySnapshot(context.read_quota(self.quota), nodes, self.hints)

    def make_service(self, certificate: tls.ServingCertificate) -> admission.Service:
        """Return a service that answers from the files alone."""
        metrics, policy = _metrics(certificate), self.policy()
        metrics.watch("vcuda_quota_config_valid", "1 while the document is in force.", lambda: 1)
        return admission.Service(lambda: policy, MemoryLedgers(), metrics, admission.Gate(), structlog.get_logger())


def _metrics(certificate: tls.ServingCertificate) -> Metrics:
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
