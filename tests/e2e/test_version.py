"""The API server's version is read with the rights that the manifests give, and is one that is supported."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import account_of
from vcuda.kube import Kube, VersionCheck

ACCOUNTS = [
    ("webhook-rbac.yaml", "vcuda-webhook"),
    ("controller-rbac.yaml", "vcuda-controller"),
    ("certs-rbac.yaml", "vcuda-certs"),
]


@pytest.mark.parametrize(("manifest", "name"), ACCOUNTS)
def test_every_service_account_may_read_the_version_which_is_accepted_without_a_word(
    cluster: Cluster, manifest: str, name: str
) -> None:
    warnings: list[str] = []
    check = VersionCheck(warnings.append, pytest.fail)
    with (
        account_of(cluster, manifest, name) as account,
        closing(Kube.connect(account.kubeconfig, version_check=check)) as kube,
    ):
        kube.get("/readyz")
    assert check.passed
    assert warnings == []
