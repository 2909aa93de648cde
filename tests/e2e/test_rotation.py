"""Tests of the rotation of certificates under load, with the rights of the manifests. No call of the webhook fails."""

import base64
import random
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from certs.parsing import read_certificates
from tests.e2e.cluster import Cluster
from tests.e2e.installation import account_of
from tests.e2e.stage import SERVER_NAME, Stage, staged, unnoticed, utc_now
from tests.e2e.steady import shake
from vcuda.x509 import signed_by

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

SHORT = ("--overlap", "3s", "--retention", "3s", "--timeout", "200s")


@pytest.fixture(scope="module")
def rotator(cluster: Cluster) -> Iterator[Path]:
    """A kubeconfig of the account that rotates certificates. The account only has the rights in the manifest."""
    with account_of(cluster, "certs-rbac.yaml", "vcuda-certs") as account:
        yield account.kubeconfig


@pytest.mark.timeout(400)
def test_no_create_fails_in_a_rotation_whose_secrets_arrive_up_to_30_s_late(
    cluster: Cluster, rotator: Path, tmp_path: Path
) -> None:
    delays = (lambda: 0.0, lambda: random.uniform(0, 30), lambda: 30.0)  # noqa: S311  # a delay is no secret
    with staged(cluster, tmp_path, delays, rotator, *SHORT) as (stage, quota), stage.team(quota) as namespace:
        old_bundles, old_leaf = set(stage.bundles()), served(stage)
        before = answered(stage, stage.bundles()[0])
        with unnoticed(stage, namespace) as creates:
            stage.rotate("--issued-before", utc_now())
        [bundle] = set(stage.bundles())
        [authority] = read_certificates(base64.b64decode(bundle))[0]
        assert not {bundle} & old_bundles
        [leaf] = served(stage)
        assert {leaf} & old_leaf == set()
        assert signed_by(x509.load_der_x509_certificate(leaf), authority)
        assert answered(stage, bundle) - before == 2 * creates.succeeded


def served(stage: Stage) -> set[bytes]:
    bundle = base64.b64decode(stage.bundles()[0])
    return {shake(address, bundle, SERVER_NAME) for address in stage.addresses()}


def answered(stage: Stage, bundle: str) -> float:
    """Return how many calls all replicas have answered. Each create causes one call of each webhook."""
    for replica in stage.replicas:
        replica.tls = ssl.create_default_context(cadata=base64.b64decode(bundle).decode())
    return sum(replica.metric("vcuda_admissions_total") for replica in stage.replicas)
