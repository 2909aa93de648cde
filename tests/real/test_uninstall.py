"""Tests that `helm uninstall` leaves nothing. This file must run last, because all other tests use the release."""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.manifests.operations import NOTHING, commands
from tests.real.node import NAME
from tests.real.release import Release, processes

pytestmark = [pytest.mark.real, pytest.mark.ci, pytest.mark.timeout(300)]


def test_nothing_of_the_release_is_left_after_helm_uninstall(cluster: Cluster, release: Release) -> None:
    uids = [pod["metadata"]["uid"] for pod in cluster.pods(SYSTEM_NAMESPACE)]
    release.helm("uninstall vcuda-quota --timeout=4m")
    for name in (SYSTEM_NAMESPACE, "vcuda-quota-ledgers", "vcuda-quota-node"):
        cluster.await_gone("/api/v1/namespaces", name, 120)
    [check] = [block for block in commands("Uninstall") if "configmaps --all-namespaces" in block]
    for line in check.splitlines():
        assert NOTHING in cluster.kubectl(*line.split()[1:]).stderr, line
    assert [processes(uid) for uid in uids] == [[] for _ in uids]
    assert NAME in cluster.kubectl("get", "nodes").stdout
