"""Tests that no request is lost when the webhook stops.

This is also tested while the API server is down, and while clients keep connections open without a request.
"""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http import HTTPStatus
from http.client import HTTPSConnection, RemoteDisconnected
from pathlib import Path

import kmock
import pytest

from tests.e2e.installation import make_certificates
from tests.integration.reviews import card_pod, pinned, review_of
from tests.integration.scripted import Answer, Script, page, serving as serving_api, status, write_kubeconfig
from tests.processes import PATIENCE, Reply, WebhookProcess, eventually, exchange, serving

pytestmark = pytest.mark.slow

LONG = ("--drain-seconds", "600")
"""A drain that is longer than any test. The webhook still answers, until a second SIGTERM to the worker."""

NAMESPACE = "/api/v1/namespaces/team-a"
QUOTA = {
    "metadata": {"name": "gpuquota", "namespace": "kube-system", "uid": "q-1", "resourceVersion": "5"},
    "data": {"gpu_quota": "team-a: {quota: {M40: 8}}"},
}
TOKEN = "a-token-nobody-may-see"
POD = json.dumps(review_of(card_pod("pod", "team-a")))


class Hanging(Script):
    """A test double of an API server with a quota and no node.

    When ``over`` is set, it answers a request for the namespace: it does not exist.
    """

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()
        self.answers_of = {
            "/version": Answer({"gitVersion": "v1.37.2"}),
            "/api/v1/namespaces/kube-system/configmaps": page(9, QUOTA),
            "/api/v1/nodes": page(9),
        }

    def __call__(self, request: kmock.Request) -> kmock.Payload:
        path = str(request.url.path)
        if "watch" in request.params and path in self.answers_of:
            return super().__call__(request)
        self.seen.append(request)
        missing = status(404, "not found")
        if path == NAMESPACE:
            missing = Answer((self._hold, missing.payload), status=404)
        return self.answers_of.get(path, missing).render()

    async def _hold(self) -> bytes:
        while not self.over.is_set():
            await asyncio.sleep(0.02)
        return b""


@pytest.fixture
def quota(tmp_path: Path) -> Path:
    path = tmp_path / "gpuquota.yaml"
    path.write_text("team-a: {quota: {M40: 8}}")
    return path


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    make_certificates(directory)
    return directory


def in_cluster(tmp_path: Path, certificates: Path, url: str) -> tuple[str | Path, ...]:
    write_kubeconfig(tmp_path / "kubeconfig", url, {"token": TOKEN})
    return ("--cert-dir", certificates, "--kubeconfig", tmp_path / "kubeconfig")


@pytest.fixture
def closed_port() -> Iterator[str]:
    """Yield the URL of a port that refuses connections. The port stays bound, so no other process uses it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield "http://{}:{}".format(*held.getsockname())


def leave(server: WebhookProcess, connection: HTTPSConnection) -> None:
    """Send SIGTERM to the webhook, and wait until /readyz fails. In this drain, the webhook still answers."""
    server.process.send_signal(signal.SIGTERM)
    while (reply := exchange(connection, "GET", "/readyz")).body != b"this replica is stopping\n":
        pass
    assert reply.status == HTTPStatus.SERVICE_UNAVAILABLE


def close_gate(server: WebhookProcess, connection: HTTPSConnection) -> Reply:
    """End the drain of the stopping webhook. Return the first answer that rejects a request because of the stop.

    The requests go to /quota, where the webhook admits them during the drain, even without an API server.
    """
    os.kill(server.worker(), signal.SIGTERM)
    while (reply := exchange(connection, "POST", "/quota", POD)).status == HTTPStatus.OK:
        pass
    return reply


def assert_come_again(reply: Reply, reason: str) -> None:
    """Assert that the answer is a 503 that closes the connection, after which an API server retries on a new one."""
    assert reply.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert reply.headers["Retry-After"] == "1"
    assert reply.headers["Connection"] == "close"
    assert reason in reply.decoded()["error"]


def test_readiness_fails_first_while_requests_are_still_answered(quota: Path) -> None:
    with serving("--standalone", "--quota", quota, *LONG) as server, closing(server.connect()) as connection:
        leave(server, connection)
        assert exchange(connection, "POST", "/mutate", POD).decoded()["response"]["allowed"]
        assert server.send("POST", "/mutate", POD).decoded()["response"]["allowed"], "on new connections too"
        assert exchange(connection, "GET", "/healthz").status == HTTPStatus.OK, "a restart would not help"
        os.kill(server.worker(), signal.SIGTERM)
        assert server.wait() == 0


def test_late_requests_are_sent_elsewhere_on_every_kept_connection(quota: Path) -> None:
    with serving("--standalone", "--quota", quota, *LONG) as server, ExitStack() as stack:
        first, second, third = (stack.enter_context(closing(server.connect())) for _ in range(3))
        for connection in (second, third):
            exchange(connection, "GET", "/healthz")
        leave(server, first)
        assert_come_again(close_gate(server, first), "this replica is stopping")
        assert_come_again(exchange(second, "POST", "/validate", POD), "this replica is stopping")
        assert_come_again(exchange(third, "POST", "/mutate", POD), "this replica is stopping")
        assert server.wait() == 0


def test_a_stop_without_requests_ends_with_status_0_and_removes_its_certificate(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        (made,) = (Path(line["ca"]) for line in server.logs() if "ca" in line)
        assert made.exists()
        assert server.terminate() == 0
        assert not made.parent.exists()


def test_a_request_in_flight_finishes(tmp_path: Path, certificates: Path) -> None:
    """When the drain ends, a request is still in progress: it waits for the API server to return a namespace."""
    api, pod = Hanging(), pinned(card_pod("train", "team-a"))
    pod["metadata"]["uid"] = "uid-1"
    with (
        serving_api(api) as url,
        serving(*in_cluster(tmp_path, certificates, url), *LONG, ca=certificates / "ca.crt") as server,
        ThreadPoolExecutor(1) as pool,
        closing(server.connect()) as other,
    ):
        server.await_ready()
        in_flight = pool.submit(server.send, "POST", "/validate", json.dumps(review_of(pod)))
        eventually(lambda: NAMESPACE in [str(request.url.path) for request in api.seen])
        leave(server, other)
        assert_come_again(close_gate(server, other), "this replica is stopping")
        assert not in_flight.done()
        api.over.set()
        reply = in_flight.result(PATIENCE)
        assert (reply.status, "namespace team-a does not exist" in str(reply.body)) == (HTTPStatus.BAD_REQUEST, True)
        assert server.wait() == 0


def test_without_the_api_server_no_pod_is_admitted_and_the_caller_retries(
    tmp_path: Path, certificates: Path, closed_port: str
) -> None:
    flags = in_cluster(tmp_path, certificates, closed_port)
    with serving(*flags, ca=certificates / "ca.crt") as server:
        reply = server.get("/readyz")
        assert (reply.status, reply.body) == (503, b"this replica has not read the quota and the nodes yet\n")
        assert server.get("/healthz").status == HTTPStatus.OK, "a restart would not help"
        for path in ("/mutate", "/validate"):
            assert_come_again(server.send("POST", path, POD), "this replica has not read the quota and the nodes yet")
        assert server.metric("vcuda_quota_config_valid") == 1, "nothing is known to be wrong with it"
        assert server.metric("vcuda_admissions_total") == 0
        assert server.terminate() == 0


def test_no_secret_is_ever_printed(tmp_path: Path, certificates: Path, closed_port: str, quota: Path) -> None:
    pod = card_pod("pod", "team-a", cards=99)
    pod["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": "swordfish"}]
    pod["metadata"]["annotations"] = {"note": "swordfish"}
    flags = in_cluster(tmp_path, certificates, closed_port)
    embedded = ("--standalone", "--quota", quota, "--cert-dir", certificates)
    printed = ""
    for each in (flags, embedded):
        with serving(*each, "--log-level", "debug", ca=certificates / "ca.crt") as server:
            server.send("POST", "/mutate", json.dumps(review_of(pod)))
            server.send("POST", "/mutate", json.dumps(review_of({**pod, "spec": "swordfish"})))
            server.terminate()
            printed += server.output()
    key = (certificates / "tls.key").read_text().splitlines()[1]
    assert "listening" in printed
    assert not [secret for secret in (key, "PRIVATE KEY", TOKEN, "swordfish") if secret in printed]


def test_connections_without_a_request_do_not_delay_a_stop(quota: Path) -> None:
    """By default, gunicorn waits for idle connections until its timeout, which exceeds the time of this test."""
    with serving("--standalone", "--quota", quota, *LONG) as server, closing(server.connect()) as connection:
        connection.connect()
        with closing(server.connect()) as other:
            leave(server, other)
        os.kill(server.worker(), signal.SIGTERM)
        assert server.wait() == 0
        with pytest.raises((RemoteDisconnected, OSError)):
            exchange(connection, "GET", "/healthz")
