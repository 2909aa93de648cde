"""What a manifest lets its ServiceAccount do, as the API server says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE, create_system_namespace
from tests.e2e.quota_config_map import QuotaConfigMap

MANIFESTS = Path(__file__).parents[2] / "manifests" / "base"


@contextmanager
def account_of(cluster: Cluster, manifest: str, name: str) -> Iterator[Cluster]:
    """The API as the ServiceAccount of this name, with what the manifest gives it; taken away at the end."""
    path = str(MANIFESTS / manifest)
    create_system_namespace(cluster)
    cluster.kubectl("apply", "-f", path)
    token = cluster.service_account_token(SYSTEM_NAMESPACE, name)
    with closing(Cluster(cluster.control_plane, token)) as account:
        yield account
    cluster.kubectl("delete", "-f", path)


def may(account: Cluster, verb: str, resource: str, namespace: str) -> bool:
    """Whether the account may do this; ``resource`` is RESOURCE.GROUP/NAME, group and name where there are any."""
    answer = account.kubectl("auth", "can-i", verb, resource, "-n", namespace, check=False).stdout.strip()
    if answer not in ("yes", "no"):
        raise RuntimeError(f"kubectl auth can-i {verb} {resource}: {answer!r}")
    return answer == "yes"


def named_quota(cluster: Cluster) -> QuotaConfigMap:
    """The quota ConfigMap that the manifests name, empty, whose edits are not checked."""
    quota = QuotaConfigMap(cluster.rest, "kube-system", "gpuquota", labels={})
    quota.write("{}").ok()
    return quota
