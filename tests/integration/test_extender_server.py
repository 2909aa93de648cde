"""The extender's way in: HTTP over TLS as kube-scheduler speaks it, and what else may come."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from controller.extender.metrics import ExtenderMetrics
from controller.extender.server import LARGEST, Server, verbs_of
from tests.api_double import ApiDouble
from tests.e2e.installation import make_certificates
from tests.extended import Leader, as_stored, shares, store_pod
from vcuda import __version__
from vcuda.tls import ServingCertificate

FILTER = "/scheduler/predicates"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def server(api: ApiDouble, registry: CollectorRegistry, tmp_path: Path) -> Iterator[Server]:
    make_certificates(tmp_path)

    def broken(_body: bytes) -> bytes:
        raise RuntimeError("a fault")

    leader = Leader(api).leads()
    verbs = {**verbs_of(leader.placer, leader.binder), "/broken": broken}
    current = ServingCertificate(tmp_path).current
    running = Server(("127.0.0.1", 0), current, verbs, ExtenderMetrics(registry))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def connection(server: Server, tmp_path: Path) -> Iterator[http.client.HTTPSConnection]:
    """One connection of the scheduler."""
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    with closing(http.client.HTTPSConnection("127.0.0.1", server.port, timeout=20, context=context)) as kept:
        yield kept


def post(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_connection_is_kept_from_filter_to_prioritize_to_preempt_to_bind(
    api: ApiDouble, connection: http.client.HTTPSConnection
) -> None:
    pod = store_pod(api, "train", 100)
    status, answer = post(connection, FILTER, {"Pod": pod, "NodeNames": ["n1", "cpu"]})
    assert (status, json.loads(answer)["NodeNames"]) == (HTTPStatus.OK, ["n1"])
    assert shares(api, "train")
    before = connection.sock
    names = {"Pod": {}, "NodeNames": ["n1", "cpu"]}
    for path in ("/scheduler/prioritize", "/scheduler/priorities"):
        status, answer = post(connection, path, names)
        assert json.loads(answer) == [{"Host": "n1", "Score": 0}, {"Host": "cpu", "Score": 10}]
    status, answer = post(connection, "/scheduler/preempt", {"Pod": pod, "NodeNameToMetaVictims": {"n1": {}}})
    assert json.loads(answer) == {"NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
    named = {"PodName": "train", "PodNamespace": "team-a", "PodUID": pod["metadata"]["uid"], "Node": "n1"}
    assert post(connection, "/scheduler/bind", named) == (HTTPStatus.OK, b'{"Error":""}')
    assert as_stored(api, "train")["spec"]["nodeName"] == "n1"
    assert connection.sock is before


def test_its_version_is_told(connection: http.client.HTTPSConnection) -> None:
    connection.request("GET", "/version")
    assert connection.getresponse().read().decode().strip() == __version__


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", FILTER, b"{", HTTPStatus.BAD_REQUEST),
        ("POST", FILTER, b"{}", HTTPStatus.BAD_REQUEST),
        ("POST", "/scheduler/preempt", b"[]", HTTPStatus.BAD_REQUEST),
        ("POST", "/scheduler/bind", b"{}", HTTPStatus.BAD_REQUEST),
        ("POST", "/scheduler/unbind", b"{}", HTTPStatus.NOT_FOUND),
        ("GET", FILTER, None, HTTPStatus.NOT_FOUND),
    ],
)
def test_what_is_no_request_of_ours_is_refused_and_the_connection_is_kept(
    connection: http.client.HTTPSConnection, method: str, path: str, body: bytes | None, status: HTTPStatus
) -> None:
    connection.request(method, path, body)
    answer = connection.getresponse()
    answer.read()
    assert answer.status == status
    assert connection.sock is not None
    assert post(connection, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


@pytest.mark.parametrize("length", ["", "-1", "x", str(LARGEST + 1)])
def test_a_body_whose_length_is_no_good_is_not_read(connection: http.client.HTTPSConnection, length: str) -> None:
    connection.putrequest("POST", FILTER)
    if length:
        connection.putheader("Content-Length", length)
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.will_close) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, True)


def test_a_fault_of_our_own_is_an_error_and_the_next_request_is_answered(
    connection: http.client.HTTPSConnection,
) -> None:
    """The scheduler tries the pod again: an error is never taken for an answer."""
    status, answer = post(connection, "/broken", {})
    assert (status, b"fault" in answer) == (HTTPStatus.INTERNAL_SERVER_ERROR, True)
    assert post(connection, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


def test_a_client_without_tls_or_without_a_word_costs_nobody_else(
    server: Server, connection: http.client.HTTPSConnection
) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port)) as silent,
        closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as plain,
    ):
        plain.request("GET", "/version")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        assert post(connection, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK
        silent.close()


def test_a_stop_hangs_up_on_everybody(server: Server, connection: http.client.HTTPSConnection) -> None:
    """Who does not lead any more must not answer on a connection that is kept."""
    assert post(connection, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK
    assert connection.sock is not None
    connection.auto_open = 0
    server.stop()
    with pytest.raises((http.client.HTTPException, OSError)):
        post(connection, "/scheduler/prioritize", {"Pod": {}})
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port))


def test_calls_are_counted_by_what_was_asked(
    connection: http.client.HTTPSConnection, registry: CollectorRegistry
) -> None:
    post(connection, "/scheduler/prioritize", {"Pod": {}})
    post(connection, "/scheduler/predicates", {"Pod": {}, "NodeNames": []})
    text = generate_latest(registry).decode()
    assert 'vcuda_extender_seconds_count{verb="prioritize"} 1.0' in text
