"""Tests that the scheduler extender answers the scheduler's calls over TLS, and rejects other clients."""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.extender.metrics import ExtenderMetrics
from controller.extender.service import LARGE_BODY, MAX_BODY, Listening, create_application, serve_extender, verbs_of
from controller.httpd import Server
from tests.api_double import ApiDouble
from tests.e2e.installation import CLIENT, CLIENT_NAME, make_certificates
from tests.extended import Leader, as_stored, shares, store_pod
from tests.waiting import PATIENT
from vcuda import __version__
from vcuda.tls import ServingCertificate, served_leaf

FILTER, PRIORITIZE = "/scheduler/predicates", "/scheduler/prioritize"
Scheduler = http.client.HTTPSConnection


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def listening(tmp_path: Path) -> Listening:
    make_certificates(tmp_path)
    certificate = ServingCertificate(tmp_path, client_ca=tmp_path / "ca.crt", client_required=True)
    return Listening(("127.0.0.1", 0), certificate, client_name=CLIENT_NAME)


@pytest.fixture
def extender(api: ApiDouble, registry: CollectorRegistry, listening: Listening) -> Iterator[Server]:
    def broken(_body: bytes) -> bytes:
        raise RuntimeError("a fault")

    leader = Leader(api).leads()
    verbs = {**verbs_of(leader.allocator), "/broken": broken}
    server = serve_extender(listening, create_application(verbs, ExtenderMetrics(registry)))
    yield server
    server.stop()


def prioritized(scheduler: Scheduler) -> bool:
    return post(scheduler, PRIORITIZE, {"Pod": {}})[0] == HTTPStatus.OK


@contextmanager
def connected(extender: Server, ca: Path, pair: Path | None) -> Iterator[Scheduler]:
    context = ssl.create_default_context(cafile=str(ca))
    if pair:
        context.load_cert_chain(pair / "tls.crt", pair / "tls.key")
    with closing(http.client.HTTPSConnection("127.0.0.1", extender.port, timeout=PATIENT, context=context)) as kept:
        yield kept


@pytest.fixture
def scheduler(extender: Server, tmp_path: Path) -> Iterator[Scheduler]:
    with connected(extender, tmp_path / "ca.crt", tmp_path / CLIENT) as kept:
        yield kept


@pytest.mark.parametrize("who", ["nobody", "the extender itself", "a client of another CA", "another client"])
def test_only_the_scheduler_is_answered(
    api: ApiDouble, listening: Listening, tmp_path: Path, registry: CollectorRegistry, who: str
) -> None:
    """If client certificates were not required, everybody who reaches the port could bind any pod to any node."""
    shown: dict[str, Path | None] = {
        "nobody": None,
        "the extender itself": tmp_path,
        "another client": tmp_path / CLIENT,
    }
    make_certificates(tmp_path / "another")
    pair = shown.get(who, tmp_path / "another" / CLIENT)
    name = "another-name" if who == "another client" else CLIENT_NAME
    application = create_application(verbs_of(Leader(api).leads().allocator), ExtenderMetrics(registry))
    server = serve_extender(msgspec.structs.replace(listening, client_name=name), application)
    with ExitStack() as stack, connected(server, tmp_path / "ca.crt", pair) as other:
        stack.callback(server.stop)
        try:
            status = post(other, PRIORITIZE, {"Pod": {}})[0]
        except (http.client.HTTPException, OSError):
            return  # the TLS handshake fails
        assert (who, status) == ("another client", HTTPStatus.FORBIDDEN)


def test_a_client_that_only_does_the_handshake_delays_no_other_and_is_not_logged(
    extender: Server, scheduler: Scheduler
) -> None:
    """`vcuda-certs` reads a certificate by a handshake alone. A stack trace for each would delay calls by a second."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(40):
            assert served_leaf(f"127.0.0.1:{extender.port}", "localhost")
        assert prioritized(scheduler)
    assert {line["log_level"] for line in logs} <= {"debug"}


class Body:
    """A request body whose last part arrives when the test permits it. ``begun``: the extender reads the body."""

    def __init__(self) -> None:
        self.begun, self.arrives = threading.Event(), threading.Event()
        self._left = b"{}"

    def read(self, _size: int) -> bytes:
        self.begun.set()
        assert self.arrives.wait(PATIENT)
        part, self._left = self._left, b""
        return part


def test_large_bodies_are_read_one_at_a_time_and_small_ones_concurrently() -> None:
    """If eight incomplete large bodies were read at a time, they would take more than a gigabyte."""
    application = create_application({"/x": lambda body: body}, ExtenderMetrics(CollectorRegistry()))

    def call(body: Body, length: int) -> bytes:
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/x", "CONTENT_LENGTH": str(length), "wsgi.input": body}
        return b"".join(application(environ, lambda *_: lambda _: None))

    first, second, small = Body(), Body(), Body()
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(call, first, LARGE_BODY + 1)]
        assert first.begun.wait(PATIENT)
        answers.append(pool.submit(call, second, MAX_BODY))
        small.arrives.set()
        assert pool.submit(call, small, LARGE_BODY).result(PATIENT) == b"{}"
        assert not second.begun.is_set()
        first.arrives.set()
        assert second.begun.wait(PATIENT)
        second.arrives.set()
        assert [answer.result(PATIENT) for answer in answers] == [b"{}", b"{}"]


def post(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_connection_is_kept_and_calls_are_counted(
    api: ApiDouble, scheduler: Scheduler, registry: CollectorRegistry
) -> None:
    pod = store_pod(api, "train", 100)
    status, answer = post(scheduler, FILTER, {"Pod": pod, "NodeNames": ["n1", "cpu"]})
    assert (status, json.loads(answer)["NodeNames"]) == (HTTPStatus.OK, ["n1"])
    assert shares(api, "train")
    before = scheduler.sock
    names = {"Pod": {}, "NodeNames": ["n1", "cpu"]}
    for path in (PRIORITIZE, "/scheduler/priorities"):
        status, answer = post(scheduler, path, names)
        assert json.loads(answer) == [{"Host": "n1", "Score": 0}, {"Host": "cpu", "Score": 10}]
    status, answer = post(scheduler, "/scheduler/preempt", {"Pod": pod, "NodeNameToMetaVictims": {"n1": {}}})
    assert json.loads(answer) == {"NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
    named = {"PodName": "train", "PodNamespace": "team-a", "PodUID": pod["metadata"]["uid"], "Node": "n1"}
    assert post(scheduler, "/scheduler/bind", named) == (HTTPStatus.OK, b'{"Error":""}')
    assert as_stored(api, "train")["spec"]["nodeName"] == "n1"
    scheduler.request("GET", "/version")
    assert scheduler.getresponse().read().decode().strip() == __version__
    assert scheduler.sock is before
    assert registry.get_sample_value("vcuda_extender_seconds_count", {"verb": "bind"}) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", FILTER, b"{", 400),
        ("POST", FILTER, b"{}", 400),
        ("POST", "/scheduler/preempt", b"[]", 400),
        ("POST", "/scheduler/bind", b"{}", 400),
        ("POST", "/scheduler/unbind", b"{}", 404),
        ("GET", FILTER, None, 404),
    ],
)
def test_an_unknown_request_is_rejected_and_the_connection_is_kept(
    scheduler: Scheduler, method: str, path: str, body: bytes | None, status: int
) -> None:
    scheduler.request(method, path, body)
    answer = scheduler.getresponse()
    answer.read()
    assert answer.status == status
    assert scheduler.sock is not None
    assert prioritized(scheduler)


@pytest.mark.parametrize(("length", "status"), [("", 413), ("-1", 413), ("x", 400), (str(MAX_BODY + 1), 413)])
def test_a_body_with_an_invalid_length_is_not_read(scheduler: Scheduler, length: str, status: int) -> None:
    scheduler.putrequest("POST", FILTER)
    if length:
        scheduler.putheader("Content-Length", length)
    scheduler.endheaders()
    assert scheduler.getresponse().status == status
    scheduler.auto_open = 0
    with pytest.raises(
        (http.client.HTTPException, OSError)
    ):  # the server cannot distinguish the rest of the body from the next request
        post(scheduler, PRIORITIZE, {"Pod": {}})


def test_a_body_of_many_nodes_is_read(scheduler: Scheduler) -> None:
    names = [f"node-{number:0200}" for number in range(40_000)]
    status, answer = post(scheduler, PRIORITIZE, {"Pod": {}, "NodeNames": names})
    assert (status, len(json.loads(answer))) == (HTTPStatus.OK, len(names))


def test_an_internal_error_is_reported_and_the_next_request_is_answered(scheduler: Scheduler) -> None:
    """After an HTTP error, the scheduler retries the pod."""
    status, answer = post(scheduler, "/broken", {})
    assert (status, b"internal error" in answer) == (HTTPStatus.INTERNAL_SERVER_ERROR, True)
    assert prioritized(scheduler)


def test_a_silent_client_or_one_without_tls_delays_no_other(extender: Server, scheduler: Scheduler) -> None:
    plain = http.client.HTTPConnection("127.0.0.1", extender.port, timeout=PATIENT)
    with socket.create_connection(("127.0.0.1", extender.port)), closing(plain):
        plain.request("GET", "/version")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        assert prioritized(scheduler)


def test_a_renewed_certificate_is_served_only_to_new_connections(
    extender: Server, listening: Listening, scheduler: Scheduler, tmp_path: Path
) -> None:
    assert prioritized(scheduler)
    make_certificates(tmp_path)
    listening.certificate.poll()
    with connected(extender, tmp_path / "ca.crt", tmp_path / CLIENT) as renewed:
        assert prioritized(renewed), "the new certificate has a new CA, which the client trusts"
    scheduler.auto_open = 0
    assert prioritized(scheduler)


def test_a_stop_closes_every_connection(extender: Server, scheduler: Scheduler) -> None:
    """A replica that no longer leads must not answer, even on an open connection."""
    assert prioritized(scheduler)
    assert scheduler.sock is not None
    scheduler.auto_open = 0
    extender.stop()
    with pytest.raises((http.client.HTTPException, OSError)):
        post(scheduler, PRIORITIZE, {"Pod": {}})
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", extender.port))
