"""The rights that the manifest gives the rotation: test_rotation.py rotates with them, and here there are no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE, account_of, may

VALIDATING = "validatingwebhookconfigurations.admissionregistration.k8s.io"
MUTATING = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
SLICES = "endpointslices.discovery.k8s.io"


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """The API as the rotation's ServiceAccount, with what the manifest gives it."""
    with account_of(cluster, "certs-rbac.yaml", "vcuda-certs") as rotation:
        yield rotation


@pytest.mark.parametrize(
    ("verb", "resource", "namespace", "allowed"),
    [
        ("get", "secrets/vcuda-webhook-ca", SYSTEM_NAMESPACE, True),
        ("patch", "secrets/vcuda-webhook-tls", SYSTEM_NAMESPACE, True),
        ("create", "secrets", SYSTEM_NAMESPACE, True),
        ("get", "secrets/another", SYSTEM_NAMESPACE, False),
        ("list", "secrets", SYSTEM_NAMESPACE, False),
        ("delete", "secrets/vcuda-webhook-ca", SYSTEM_NAMESPACE, False),
        ("create", "secrets", "default", False),
        ("get", "secrets/vcuda-webhook-ca", "default", False),
        ("list", SLICES, SYSTEM_NAMESPACE, True),
        ("list", SLICES, "default", False),
        ("get", SLICES, SYSTEM_NAMESPACE, False),
        ("watch", SLICES, SYSTEM_NAMESPACE, False),
        ("create", SLICES, SYSTEM_NAMESPACE, False),
        ("patch", SLICES, SYSTEM_NAMESPACE, False),
        ("delete", SLICES, SYSTEM_NAMESPACE, False),
        ("list", VALIDATING, "default", True),
        ("patch", f"{VALIDATING}/vcuda-quota", "default", True),
        ("patch", f"{MUTATING}/vcuda-quota", "default", True),
        ("patch", f"{MUTATING}/another", "default", False),
        ("create", VALIDATING, "default", False),
        ("delete", f"{VALIDATING}/vcuda-quota", "default", False),
        ("get", "configmaps/gpuquota", "kube-system", False),
    ],
)
def test_the_manifest_gives_what_is_needed_and_no_more(
    account: Cluster, verb: str, resource: str, namespace: str, *, allowed: bool
) -> None:
    assert may(account, verb, resource, namespace) is allowed
