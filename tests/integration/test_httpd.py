"""Tests that no client can use up threads or memory of the controller's HTTP server, or stop its process."""

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from controller.httpd import MAX_CONNECTIONS, MAX_HEAD_BYTES, Server, serve_status
from tests.waiting import PATIENT

SHORT = 0.3
"""The time limit of an HTTP request in these tests, in seconds."""

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
Serve = Callable[..., Server]
Respond = Callable[[str, list[tuple[str, str]]], object]
Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def hello(_: dict[str, Any], start_response: Respond) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


class Held:
    """A WSGI application that delays its answer until the test permits it."""

    def __init__(self) -> None:
        self.going = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, environ: dict[str, Any], start_response: Respond) -> Iterable[bytes]:
        self.entered.release()
        assert self.going.wait(PATIENT)
        return hello(environ, start_response)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    with ExitStack() as teardown:

        def run(application: Application = hello, threads: int = 8, seconds: float = SHORT, **more: Any) -> Server:
            monkeypatch.setattr("controller.httpd.REQUEST_SECONDS", seconds)
            server = Server(("127.0.0.1", 0), application, threads=threads, **more)
            teardown.callback(server.stop)
            return server.in_threads()

        yield run


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENT)) as connection:
        yield connection


def said(connection: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            answer += part
    return answer


def ask(server: Server, request: bytes = GET) -> bytes:
    with connected(server) as connection:
        connection.sendall(request)
        return said(connection)


def test_a_request_is_answered_and_the_connection_ends(running: Serve) -> None:
    answer = ask(running())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\nhello")


@pytest.mark.parametrize(("sent", "hears"), [(b"", b""), (b"GET / HTTP/1.1\r\nX: ", b"HTTP/1.1 408 ")])
def test_a_head_that_never_ends_times_out(running: Serve, sent: bytes, hears: bytes) -> None:
    server = running(threads=1)
    with connected(server) as slow:
        slow.sendall(sent)
        assert said(slow)[:13] == hears
    assert ask(server).endswith(b"hello")


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"])
def test_a_slow_request_times_out_although_every_byte_is_in_time(running: Serve, head: bytes) -> None:
    def reading(environ: dict[str, Any], start_response: Respond) -> Iterable[bytes]:
        environ["wsgi.input"].read()
        return hello(environ, start_response)

    server = running(reading, threads=1)
    stop = threading.Event()
    with connected(server) as slow:

        def trickle() -> None:
            with suppress(OSError):
                while not stop.wait(SHORT / 10):
                    slow.send(b"a")

        slow.sendall(head)
        sender = threading.Thread(target=trickle)
        sender.start()
        assert b"hello" not in said(slow)
        stop.set()
        sender.join()
    assert ask(server).endswith(b"hello")


def test_a_huge_head_or_body_is_rejected_before_the_timeout(running: Serve) -> None:
    server = running(seconds=60, max_body=1000)
    answer = ask(server, b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEAD_BYTES)
    # The server has not read the whole request, so it may reset the connection. Then the client gets no answer.
    assert answer[:13] in (b"HTTP/1.1 413 ", b"")
    assert ask(server, b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n").startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("line", [b"", b"\r\n", b"nonsense\r\n", b"GET / HTTP/9.9\r\n", b"GET\r\n", b"\xff\xfe\r\n"])
def test_bytes_that_are_no_request_get_no_page(running: Serve, line: bytes) -> None:
    with connected(running()) as connection:
        connection.sendall(line and line + b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = said(connection)
    assert b"hello" not in answer
    assert b"Traceback" not in answer


def test_a_client_that_does_not_read_is_disconnected(running: Serve) -> None:
    """Otherwise such a client would occupy a thread of the server."""
    closed = threading.Event()

    def endless(_: dict[str, Any], start_response: Respond) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            while True:
                yield b"x" * 2**20
        finally:
            closed.set()

    with connected(running(endless, threads=1)) as lazy:
        lazy.sendall(GET)
        assert closed.wait(PATIENT)


def test_one_connection_too_many_gets_503_and_uses_no_thread(running: Serve) -> None:
    held = Held()
    server = running(held, threads=2, seconds=20)
    with ExitStack() as stack:
        served = [stack.enter_context(connected(server)) for _ in range(4)]
        for connection in served[:2]:
            connection.sendall(GET)
            assert held.entered.acquire(timeout=PATIENT)
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


def test_silent_connections_use_no_thread_and_are_bounded(running: Serve) -> None:
    server = running(threads=1, seconds=20)
    with ExitStack() as silent:
        for number in range(1, MAX_CONNECTIONS + 1):
            silent.enter_context(connected(server))
            if number == MAX_CONNECTIONS - 1:
                assert ask(server).endswith(b"hello")
            while len(server.open) != number:
                pass  # this loop waits until the server has accepted the connection
        with connected(server) as too_many:
            assert said(too_many).startswith(b"HTTP/1.1 503 ")


def test_an_error_of_the_application_gets_a_short_answer_and_the_next_request_is_served(running: Serve) -> None:
    faults = iter([True, False])

    def faulty(environ: dict[str, Any], start_response: Respond) -> Iterable[bytes]:
        if next(faults):
            raise ZeroDivisionError("secret")
        return hello(environ, start_response)

    server = running(faulty)
    with structlog.testing.capture_logs() as logged:
        answer = ask(server)
        assert ask(server).endswith(b"hello")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert "a request could not be served" in [entry["event"] for entry in logged]


def test_the_application_does_not_see_the_environment_of_the_process(running: Serve) -> None:
    seen: dict[str, Any] = {}

    def look(environ: dict[str, Any], start_response: Respond) -> Iterable[bytes]:
        seen.update(environ)
        return hello(environ, start_response)

    ask(running(look), b"GET /a%20b?c=d HTTP/1.1\r\nHost: localhost\r\nX-Y: z\r\nSneaky_Header: 1\r\n\r\n")
    wanted = {"REQUEST_METHOD": "GET", "PATH_INFO": "/a b", "QUERY_STRING": "c=d", "HTTP_X_Y": "z"}
    assert wanted.items() <= seen.items()
    assert "PATH" not in seen
    assert "HTTP_SNEAKY_HEADER" not in seen


def test_a_stop_closes_connections_in_the_middle_of_an_answer(running: Serve) -> None:
    held = Held()
    server = running(held, seconds=20)
    server.shutdown_timeout = 1
    with connected(server) as served, connected(server) as silent:
        served.sendall(GET)
        assert held.entered.acquire(timeout=PATIENT)
        server.stop()
        assert (said(served), said(silent)) == (b"", b"")
        held.going.set()


# Tests of the controller's and the node agent's status server


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_the_status_is_served_over_ipv4_and_ipv6(host: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    server = serve_status((host, 0), CollectorRegistry(), healthy=lambda: None, ready=lambda: "not yet")
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    with urllib.request.urlopen(f"http://{shown}:{server.port}/healthz?verbose") as answer:
        assert (answer.status, answer.read()) == (200, b"ok\n")
    if ":" not in host:
        assert ask(server, b"GET /readyz HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")
    server.stop()
