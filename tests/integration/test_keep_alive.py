"""Connections are kept longer than the API server keeps them, so it never sends a call to one that closes just then."""

import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import WebhookProcess, exchange, serving

# Go's http.Transport closes what was idle for 90 s, which k8s.io/apimachinery's SetTransportDefaults leaves as it is.
API_SERVER_IDLE_SECONDS = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(API_SERVER_IDLE_SECONDS + 120)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebhookProcess]:
    quota = tmp_path / "gpuquota.yaml"
    quota.write_text("{}")
    with serving("--standalone", "--quota", quota) as running:
        yield running


def test_a_connection_outlives_the_api_servers_own_whether_it_was_used_before_or_not(server: WebhookProcess) -> None:
    with closing(server.connect()) as used, closing(server.connect()) as unused:
        unused.connect()
        assert exchange(used, "GET", "/healthz").status == 200
        for connection, seconds in ((used, API_SERVER_IDLE_SECONDS + 1), (unused, 0.1)):
            assert isinstance(connection.sock, ssl.SSLSocket)
            kept = connection.sock
            kept.settimeout(seconds)
            # A server that closes is what would end this wait; nothing else is sent to an idle connection.
            with pytest.raises(TimeoutError):
                kept.recv(1)
            kept.settimeout(10)
            assert exchange(connection, "GET", "/healthz").status == 200
            assert connection.sock is kept
