"""Serves the webhook without a cluster: the quota and the nodes come from files, and the ledgers are in memory."""

import msgspec
import structlog

from vcuda.quota.quota_clock import QuotaClock
from vcuda.tls import ServingCertificate
from webhook import admission
from webhook.check import files
from webhook.review import context
from webhook.server.server import make_metrics


def standalone_service(cluster: files.OfflineCluster, certificate: ServingCertificate) -> admission.Service:
    metrics, policy = make_metrics(certificate), cluster.policy
    metrics.watch("vcuda_quota_config_valid", "Always 1, because the quota file was valid at the start.", lambda: 1)
    clock = QuotaClock()

    def current() -> context.PolicySnapshot:
        return msgspec.structs.replace(policy, quota=clock.now(policy.quota))

    return admission.Service(current, cluster.ledgers(), metrics, admission.Gate(), structlog.get_logger())
