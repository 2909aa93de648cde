"""The webhook keeps idle connections open longer than the API server does.

So the API server never sends a request on a connection that the webhook is closing.
"""

import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import WebhookProcess, exchange, serving

# The API server calls webhooks by Go's http.Transport, which closes a connection that was idle for 90 s. This is the
# default of SetTransportDefaults in k8s.io/apimachinery.
API_SERVER_IDLE_SECONDS = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(API_SERVER_IDLE_SECONDS + 120)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebhookProcess]:
    quota = tmp_path / "gpuquota.yaml"
    quota.write_text("{}")
    with serving("--standalone", "--quota", quota) as running:
        yield running


def test_a_connection_stays_open_longer_than_the_api_servers_idle_timeout(server: WebhookProcess) -> None:
    with closing(server.connect()) as used, closing(server.connect()) as unused:
        unused.connect()
        assert exchange(used, "GET", "/healthz").status == 200
        for connection, seconds in ((used, API_SERVER_IDLE_SECONDS + 1), (unused, 0.1)):
            assert isinstance(connection.sock, ssl.SSLSocket)
            kept = connection.sock
            kept.settimeout(seconds)
            # A server sends nothing on an idle connection. So recv() ends before its timeout only if the server closes
            # the connection.
            with pytest.raises(TimeoutError):
                kept.recv(1)
            kept.settimeout(10)
            assert exchange(connection, "GET", "/healthz").status == 200
            assert connection.sock is kept
