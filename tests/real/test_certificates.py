"""Tests that replace the certificates while pods are created. The kubelet updates the mounted Secret."""

import subprocess
from datetime import UTC, datetime

import pytest

from tests.e2e.cluster import Cluster
from tests.processes import SCRIPTS
from tests.real.creates import creating
from tests.real.release import Release

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_no_create_fails_while_the_ca_and_the_leaf_are_replaced(cluster: Cluster, release: Release) -> None:
    assert release.seconds_to_register
    now = f"{datetime.now(UTC):%FT%TZ}"
    spans = ("--overlap=20s", "--retention=20s", "--timeout=10m")
    with creating(cluster) as answers:
        done = subprocess.run(
            (SCRIPTS / "vcuda-certs", "rotate", f"--kubeconfig={cluster.kubeconfig}", f"--issued-before={now}", *spans),
            capture_output=True,
            text=True,
            check=False,
            timeout=660,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout + done.stderr)
    answers.only("429")
