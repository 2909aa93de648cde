"""The rights that the manifests give the webhook: enough for its work, and none besides."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation, account_of, installed, named_quota
from tests.integration.reviews import card_pod


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """The API as the webhook's ServiceAccount, with what the manifest gives it."""
    with account_of(cluster, "webhook-rbac.yaml", "vcuda-webhook") as account:
        yield account


@pytest.fixture(scope="module")
def own(cluster: Cluster, account: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """The webhook with that account, on the quota ConfigMap that the manifest names, whose edits are not checked."""
    directory = tmp_path_factory.mktemp("rbac")
    with installed(cluster, directory, kubeconfig=account.kubeconfig, quota=named_quota(cluster)) as installation:
        yield installation


def test_with_the_rights_of_the_manifest_pods_are_pinned_charged_and_refused(
    cluster: Cluster, own: Installation
) -> None:
    """The second pod takes the ledger's update, the first one its creation and a LIST of pods."""
    with own.team({"quota": {"M40": 2}}) as namespace:
        for name in ("first", "second"):
            assert cluster.create(card_pod(name, namespace))["metadata"]["annotations"]["quota.vcuda.io/model"] == "M40"
        assert cluster.try_create(card_pod("third", namespace)).status == HTTPStatus.FORBIDDEN
        assert own.charged(namespace) == {"M40": 200}


def test_with_the_rights_of_the_manifest_a_malformed_quota_is_reported(cluster: Cluster, own: Installation) -> None:
    good = own.quota.document()
    stored = own.quota.write("{team-a: 8}").ok()
    about_it = f"metadata.name=gpuquota.malformed-{stored['metadata']['resourceVersion']}"
    [event] = cluster.await_events("kube-system", about_it)
    assert event["reason"] == "MalformedQuota"
    assert event["involvedObject"]["uid"] == stored["metadata"]["uid"]
    own.quota.limit_anew(**good)


@pytest.mark.parametrize("resource", ["configmaps", "nodes", "cards"])
def test_with_the_rights_of_the_manifest_no_list_and_no_watch_fails(own: Installation, resource: str) -> None:
    incidents = {
        kind: own.replica.metric("vcuda_watch_incidents_total", resource=resource, kind=kind)
        for kind in ("lists", "watches", "failures")
    }
    assert incidents == {"lists": 1, "watches": 1, "failures": 0}
