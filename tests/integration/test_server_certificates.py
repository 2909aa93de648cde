"""Tests of the certificate that the webhook serves after its files changed, or after its worker was replaced."""

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.integration.pairs import AUTHORITY, NOW, der, new_leaf, write_as_kubelet
from tests.processes import WebhookProcess, eventually, exchange, serving
from vcuda.x509 import DEVELOPMENT, make_authority, make_leaf

pytestmark = pytest.mark.slow


@pytest.fixture
def server(directory: Path, tmp_path: Path) -> Iterator[WebhookProcess]:
    write_as_kubelet(directory, new_leaf())
    (directory / "ca.crt").write_bytes(AUTHORITY.certificate_pem())
    quota = tmp_path / "gpuquota.yaml"
    quota.write_text("team-a: {quota: {M40: 8}}")
    with serving("--standalone", "--quota", quota, "--cert-dir", directory, ca=directory / "ca.crt") as running:
        yield running


def presented_by(server: WebhookProcess) -> bytes | None:
    with closing(server.connect()) as connection:
        assert exchange(connection, "GET", "/healthz").status == HTTPStatus.OK
        assert connection.sock is not None
        leaf: bytes | None = connection.sock.getpeercert(binary_form=True)
        return leaf


def test_the_webhook_serves_a_new_certificate_without_a_lost_request_and_never_a_partial_one(
    directory: Path, server: WebhookProcess
) -> None:
    new = new_leaf()
    with closing(server.connect()) as kept:
        exchange(kept, "GET", "/healthz")
        used = kept.sock
        write_as_kubelet(directory, new)
        while presented_by(server) != der(new):
            assert exchange(kept, "GET", "/healthz").status == HTTPStatus.OK
        (directory / "tls.key").write_bytes(new_leaf().key_pem()[:100])
        while not server.metric("vcuda_serving_certificate_reload_failures_total"):
            assert presented_by(server) == der(new)
        assert exchange(kept, "GET", "/healthz").status == HTTPStatus.OK
        assert kept.sock is used


def replace_worker(server: WebhookProcess) -> None:
    killed, pid = server.worker(), server.process.pid
    os.kill(killed, signal.SIGKILL)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    eventually(lambda: children.read_text().split() not in ([], [str(killed)]))


def test_a_new_worker_serves_the_certificate_of_the_files_from_its_first_connection(
    directory: Path, server: WebhookProcess
) -> None:
    """gunicorn forks a new worker from the parent process, in whose memory the certificate may have expired."""
    authority = make_authority(NOW)
    write_as_kubelet(directory, make_leaf(authority, DEVELOPMENT, NOW))
    replace_worker(server)
    server.tls = ssl.create_default_context(cadata=authority.certificate_pem().decode())
    assert server.get("/healthz").status == HTTPStatus.OK


def test_a_new_worker_that_finds_an_invalid_certificate_serves_the_first_one(
    directory: Path, server: WebhookProcess
) -> None:
    (directory / "tls.key").write_bytes(b"garbage")
    replace_worker(server)
    assert server.get("/healthz").status == HTTPStatus.OK
    assert server.metric("vcuda_serving_certificate_reload_failures_total") == 1
