"""The server of the status, the usage page and the extender: no client holds on to its threads, memory or process."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry, generate_latest

from controller.extender.publish import ExtenderMetrics
from controller.extender.service import MAX_BODY, Listening, create_application, verbs_of
from controller.extender.service import serve as serve_extender
from controller.httpd import MAX_CONNECTIONS, MAX_HEAD_BYTES, Server, serve_status
from controller.ui.app import Standing, create_app
from controller.ui.feed import Feed
from controller.ui.leading import UsagePage
from controller.ui.page import Views
from tests.api_double import ApiDouble
from tests.e2e.installation import make_certificates
from tests.extended import Leader, as_stored, shares, store_pod
from tests.usage_samples import NOW, Sample, company, model_use, namespace_use
from vcuda import __version__
from vcuda.tls import ServingCertificate

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

SHORT = 0.3
"""Seconds that these servers have for a request."""

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
FILTER = "/scheduler/predicates"
Serve = Callable[..., Server]
Scheduler = http.client.HTTPSConnection


def hello(_: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Answer everything."""
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


class Held:
    """An application that answers once it may."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        self.entered.release()
        assert self.going.wait(20)
        return hello(environ, start_response)


@pytest.fixture
def running() -> Iterator[Serve]:
    """Call it with an application: a server with little patience, gone after the test."""
    with ExitStack() as teardown:

        def run(application: WSGIApplication = hello, threads: int = 8, seconds: float = SHORT, **more: Any) -> Server:
            server = Server(("127.0.0.1", 0), application, threads=threads, request_seconds=seconds, **more)
            server.in_threads()
            teardown.callback(server.stop)
            return server

        yield run


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    """A connection, with nothing sent yet."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as connection:
        yield connection


def said(connection: socket.socket) -> bytes:
    """Everything until the server hangs up."""
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        return answer
    return answer


def ask(server: Server, request: bytes = GET) -> bytes:
    """The whole answer to a request."""
    with connected(server) as connection:
        connection.sendall(request)
        return said(connection)


def test_a_request_is_answered_and_the_connection_ends(running: Serve) -> None:
    answer = ask(running())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize(("sent", "hears"), [(b"", b""), (b"GET / HTTP/1.1\r\nX: ", b"HTTP/1.1 408 ")])
def test_a_head_that_never_ends_is_given_up(running: Serve, sent: bytes, hears: bytes) -> None:
    server = running(threads=1)
    with connected(server) as slow:
        slow.sendall(sent)
        assert said(slow)[:13] == hears
    assert ask(server).endswith(b"hello")


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"])
def test_what_trickles_in_is_given_up_though_every_byte_is_in_time(running: Serve, head: bytes) -> None:
    def reading(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        environ["wsgi.input"].read()
        return hello(environ, start_response)

    server = running(reading, threads=1)
    stop = threading.Event()
    with connected(server) as slow:

        def trickle() -> None:
            while not stop.wait(SHORT / 10):
                try:
                    slow.send(b"a")
                except OSError:
                    return

        slow.sendall(head)
        sender = threading.Thread(target=trickle)
        sender.start()
        assert b"hello" not in said(slow)
        stop.set()
        sender.join()
    assert ask(server).endswith(b"hello")


def test_a_head_without_end_is_given_up_before_the_time_is(running: Serve) -> None:
    answer = ask(running(seconds=60), b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEAD_BYTES)
    assert answer[:13] in (b"HTTP/1.1 413 ", b"")  # the rest of it, unread, may have the answer lost


@pytest.mark.parametrize(
    "request_line",
    [b"", b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n"],
)
def test_what_is_no_request_gets_no_page(running: Serve, request_line: bytes) -> None:
    with connected(running()) as connection:
        connection.sendall(request_line)
        connection.shutdown(socket.SHUT_WR)
        answer = said(connection)
    assert b"hello" not in answer
    assert b"Traceback" not in answer


def test_a_body_that_is_too_large_is_not_read(running: Serve) -> None:
    server = running(max_body=1000)
    assert ask(server, b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n").startswith(b"HTTP/1.1 413 ")


def test_a_reader_who_does_not_read_is_hung_up_on(running: Serve) -> None:
    """The thread is free again."""
    closed = threading.Event()

    def endless(_: dict[str, Any], start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            while True:
                yield b"x" * 2**20
        finally:
            closed.set()

    with connected(running(endless, threads=1)) as lazy:
        lazy.sendall(GET)
        assert closed.wait(20)


def test_one_connection_too_many_is_told_to_come_again_and_costs_no_thread(running: Serve) -> None:
    """Two are served, two more wait for a thread."""
    held = Held()
    server = running(held, threads=2, seconds=20)
    with ExitStack() as stack:
        served = [stack.enter_context(connected(server)) for _ in range(4)]
        for connection in served[:2]:
            connection.sendall(GET)
            assert held.entered.acquire(timeout=20)
        threads = threading.active_count()
        for connection in served[2:]:
            connection.sendall(GET)
        while server.requests.qsize < 2:
            pass
        answer = ask(server)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 5\r\n" in answer
        assert threading.active_count() <= threads
        held.going.set()
        assert all(said(connection).endswith(b"hello") for connection in served)
    assert ask(server).endswith(b"hello")


def test_silent_connections_cost_no_thread_and_are_bounded(running: Serve) -> None:
    server = running(threads=1, seconds=20)
    with ExitStack() as silent:
        for number in range(1, MAX_CONNECTIONS + 1):
            silent.enter_context(connected(server))
            if number == MAX_CONNECTIONS - 1:
                assert ask(server).endswith(b"hello")
            while len(server.open) != number:
                pass  # the bound is on what was accepted and has not ended
        with connected(server) as too_many:
            assert said(too_many).startswith(b"HTTP/1.1 503 ")


def test_a_fault_of_the_application_is_a_short_answer_and_the_next_request_is_served(running: Serve) -> None:
    faults = iter([True, False])

    def faulty(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if next(faults):
            raise ZeroDivisionError("secret")
        return hello(environ, start_response)

    server = running(faulty)
    with structlog.testing.capture_logs() as logged:
        answer = ask(server)
        assert ask(server).endswith(b"hello")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert "request not served" in [entry["event"] for entry in logged]


def test_the_process_s_environment_is_not_the_application_s(running: Serve) -> None:
    seen: dict[str, Any] = {}

    def look(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return hello(environ, start_response)

    ask(running(look), b"GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y: z\r\nSneaky_Header: 1\r\n\r\n")
    wanted = {"REQUEST_METHOD": "GET", "PATH_INFO": "/a b", "QUERY_STRING": "c=d", "HTTP_X_Y": "z"}
    assert wanted.items() <= seen.items()
    assert "PATH" not in seen
    assert "HTTP_SNEAKY_HEADER" not in seen


def test_a_stop_hangs_up_in_the_middle_of_an_answer(running: Serve) -> None:
    held = Held()
    server = running(held, seconds=20)
    server.shutdown_timeout = 1
    with connected(server) as served, connected(server) as silent:
        served.sendall(GET)
        assert held.entered.acquire(timeout=20)
        server.stop()
        assert (said(served), said(silent)) == (b"", b"")
        held.going.set()


# The status of the controller and of the node agent


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_the_status_is_served_to_either_family(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    server = serve_status((host, 0), CollectorRegistry(), healthy=lambda: None, ready=lambda: "not yet")
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    with urllib.request.urlopen(f"http://{shown}:{server.port}/healthz?verbose") as answer:
        assert (answer.status, answer.read()) == (200, b"ok\n")
    if ":" not in host:
        assert ask(server, b"GET /readyz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
    server.stop()


# The usage page


class Shown:
    """A page that is served, and what it shows."""

    def __init__(self, running: Serve, sample: Sample, **feed: float) -> None:
        views = Views(lambda: NOW)
        self.feed = Feed(sample.source(), views, **feed)  # type: ignore[arg-type]  # its bounds
        self.feed.start()
        self.server = running(create_app(lambda: Standing(self.feed, ""), views))


def await_line(stream: IO[bytes], wanted: bytes) -> list[bytes]:
    """Return the lines of a stream up to the one wanted."""
    lines = []
    while (line := stream.readline()) != wanted:
        assert line, "the stream has ended"
        lines.append(line)
    return lines


def status_of_listening(server: Server, version: str) -> bytes:
    """The status line of one who wants to listen, and hangs up."""
    with connected(server) as listener, listener.makefile("rb") as stream:
        listener.sendall(f"GET /updates?since={version} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return stream.readline()


def test_a_replica_stands_by_until_it_leads_and_has_seen_everything() -> None:
    ready = [False]
    page = UsagePage(lambda: "pod-7")
    assert page.standing().reason == "This controller stands by: pod-7 leads."
    page.show(Sample().source(), lambda: ready[0])
    assert page.standing().feed is None
    assert "is reading the cluster" in page.standing().reason
    ready[0] = True
    feed = page.standing().feed
    assert feed is not None
    page.close()
    assert page.standing().feed is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_a_page_can_only_be_read_and_a_body_is_not(running: Serve, method: str) -> None:
    shown = Shown(running, Sample())
    answer = ask(shown.server, f"{method} / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer or method == "CONNECT"
    shown.feed.close()


def test_a_listener_hears_of_a_change_and_leaves_its_place_when_it_hangs_up(running: Serve) -> None:
    sample = Sample()
    sample.report(namespace_use("team-a", model_use("M40", 8)))
    shown = Shown(running, sample, min_interval=0.05, heartbeat=0.1, most=1)
    server, version = shown.server, shown.feed.picture().version
    with connected(server) as listener, listener.makefile("rb") as stream:
        listener.sendall(f"GET /updates?since={version} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert b"Content-Type: text/event-stream\r\n" in await_line(stream, b"retry: 2000\n")
        sample.report(namespace_use("team-a", model_use("M40", 8, 3)))
        await_line(stream, b"event: change\n")
        assert b"<b>3</b> of 8" in stream.readline()
        assert ask(server, b"GET /updates HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 503 ")
    while (status := status_of_listening(server, version)) != b"HTTP/1.1 200 OK\r\n":
        assert status.startswith(b"HTTP/1.1 503 ")  # until a heartbeat finds nobody there
    shown.feed.close()


def test_listeners_that_read_nothing_hold_up_neither_pages_nor_pictures(running: Serve) -> None:
    """A slow browser costs its own thread and place, until what is sent to it has not been taken for too long."""
    sample = company()
    shown = Shown(running, sample, min_interval=0, heartbeat=0.01)
    with ExitStack() as lazy:
        for _ in range(4):
            connection = lazy.enter_context(connected(shown.server))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(b"GET /updates?since=x HTTP/1.1\r\nHost: x\r\n\r\n")
        for used in range(20):
            sample.report(namespace_use("ci", model_use("T4", 40, used)))
            assert f"<b>{used}</b> of 40".encode() in ask(shown.server)
    shown.feed.close()


# The extender


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def listening(tmp_path: Path) -> Listening:
    make_certificates(tmp_path)
    return Listening(("127.0.0.1", 0), ServingCertificate(tmp_path))


@pytest.fixture
def extender(api: ApiDouble, registry: CollectorRegistry, listening: Listening) -> Iterator[Server]:
    def broken(_body: bytes) -> bytes:
        raise RuntimeError("a fault")

    leader = Leader(api).leads()
    verbs = {**verbs_of(leader.allocator), "/broken": broken}
    server = serve_extender(listening, create_application(verbs, ExtenderMetrics(registry)))
    yield server
    server.stop()


@pytest.fixture
def scheduler(extender: Server, tmp_path: Path) -> Iterator[Scheduler]:
    """One connection of the scheduler."""
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    with closing(http.client.HTTPSConnection("127.0.0.1", extender.port, timeout=20, context=context)) as kept:
        yield kept


def post(connection: http.client.HTTPConnection, path: str, body: object) -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_a_connection_is_kept_from_filter_to_bind(api: ApiDouble, scheduler: Scheduler) -> None:
    pod = store_pod(api, "train", 100)
    status, answer = post(scheduler, FILTER, {"Pod": pod, "NodeNames": ["n1", "cpu"]})
    assert (status, json.loads(answer)["NodeNames"]) == (HTTPStatus.OK, ["n1"])
    assert shares(api, "train")
    before = scheduler.sock
    names = {"Pod": {}, "NodeNames": ["n1", "cpu"]}
    for path in ("/scheduler/prioritize", "/scheduler/priorities"):
        status, answer = post(scheduler, path, names)
        assert json.loads(answer) == [{"Host": "n1", "Score": 0}, {"Host": "cpu", "Score": 10}]
    status, answer = post(scheduler, "/scheduler/preempt", {"Pod": pod, "NodeNameToMetaVictims": {"n1": {}}})
    assert json.loads(answer) == {"NodeNameToMetaVictims": {"n1": {"Pods": [], "NumPDBViolations": 0}}}
    named = {"PodName": "train", "PodNamespace": "team-a", "PodUID": pod["metadata"]["uid"], "Node": "n1"}
    assert post(scheduler, "/scheduler/bind", named) == (HTTPStatus.OK, b'{"Error":""}')
    assert as_stored(api, "train")["spec"]["nodeName"] == "n1"
    assert scheduler.sock is before


def test_its_version_is_told(scheduler: Scheduler) -> None:
    scheduler.request("GET", "/version")
    assert scheduler.getresponse().read().decode().strip() == __version__


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
    scheduler: Scheduler, method: str, path: str, body: bytes | None, status: HTTPStatus
) -> None:
    scheduler.request(method, path, body)
    answer = scheduler.getresponse()
    answer.read()
    assert answer.status == status
    assert scheduler.sock is not None
    assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ("-1", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
        ("x", HTTPStatus.BAD_REQUEST),
        (str(MAX_BODY + 1), HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ],
)
def test_a_body_whose_length_is_no_good_is_not_read(scheduler: Scheduler, length: str, status: HTTPStatus) -> None:
    scheduler.putrequest("POST", FILTER)
    if length:
        scheduler.putheader("Content-Length", length)
    scheduler.endheaders()
    assert scheduler.getresponse().status == status
    scheduler.auto_open = 0
    with pytest.raises((http.client.HTTPException, OSError)):  # what follows cannot be told from a next request
        post(scheduler, "/scheduler/prioritize", {"Pod": {}})


def test_a_body_of_many_nodes_is_read(scheduler: Scheduler) -> None:
    names = [f"node-{number:0200}" for number in range(40_000)]
    status, answer = post(scheduler, "/scheduler/prioritize", {"Pod": {}, "NodeNames": names})
    assert (status, len(json.loads(answer))) == (HTTPStatus.OK, len(names))


def test_a_fault_of_our_own_is_an_error_and_the_next_is_answered(scheduler: Scheduler) -> None:
    """The scheduler tries the pod again: an error is never taken for an answer."""
    status, answer = post(scheduler, "/broken", {})
    assert (status, b"fault" in answer) == (HTTPStatus.INTERNAL_SERVER_ERROR, True)
    assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


def test_a_client_without_tls_or_a_word_costs_nobody_else(extender: Server, scheduler: Scheduler) -> None:
    with connected(extender), closing(http.client.HTTPConnection("127.0.0.1", extender.port, timeout=20)) as plain:
        plain.request("GET", "/version")
        with pytest.raises((http.client.HTTPException, OSError)):
            plain.getresponse()
        assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


def test_a_renewed_certificate_is_served_to_new_connections_alone(
    extender: Server, listening: Listening, scheduler: Scheduler, tmp_path: Path
) -> None:
    assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK
    before = ssl.get_server_certificate(("127.0.0.1", extender.port))
    make_certificates(tmp_path)
    listening.certificate.poll()
    assert ssl.get_server_certificate(("127.0.0.1", extender.port)) != before
    scheduler.auto_open = 0
    assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK


def test_a_stop_hangs_up_on_everybody(extender: Server, scheduler: Scheduler) -> None:
    """Who does not lead any more must not answer on a connection that is kept."""
    assert post(scheduler, "/scheduler/prioritize", {"Pod": {}})[0] == HTTPStatus.OK
    assert scheduler.sock is not None
    scheduler.auto_open = 0
    extender.stop()
    with pytest.raises((http.client.HTTPException, OSError)):
        post(scheduler, "/scheduler/prioritize", {"Pod": {}})
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", extender.port))


def test_calls_are_counted_by_what_was_asked(scheduler: Scheduler, registry: CollectorRegistry) -> None:
    post(scheduler, "/scheduler/prioritize", {"Pod": {}})
    post(scheduler, "/scheduler/predicates", {"Pod": {}, "NodeNames": []})
    text = generate_latest(registry).decode()
    assert 'vcuda_extender_seconds_count{verb="prioritize"} 1.0' in text
