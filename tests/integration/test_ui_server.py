"""The server of the usage page cannot be made to hold on to threads, memory or the process, whoever connects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import IO, TYPE_CHECKING, Any

import pytest
import structlog.testing

from controller.ui import server as server_module
from controller.ui.app import Standing, create_app
from controller.ui.feed import Feed
from controller.ui.page import Views
from controller.ui.server import LONGEST_HEAD, Server, serve
from tests.usage_samples import NOW, Sample, company, model_use, namespace_use

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication

SHORT = 0.3
"""Seconds of patience in these tests."""

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Serve = Callable[..., Server]


def hello(_: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """Answer everything."""
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "5")])
    return [b"hello"]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Call it with an application: a server with little patience, gone after the test."""
    monkeypatch.setattr(server_module, "PATIENCE", SHORT)
    with ExitStack() as teardown:

        def run(application: WSGIApplication = hello, most: int = 8) -> Server:
            server = serve(("127.0.0.1", 0), application, most)
            teardown.callback(server.server_close)
            teardown.callback(server.shutdown)
            return server

        yield run


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    """A connection, with nothing sent yet."""
    with closing(socket.create_connection(server.server_address[:2], timeout=20)) as connection:  # type: ignore[arg-type]  # an IPv4 address
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


def ask_when_free(server: Server) -> bytes:
    """The answer once a thread is free: the one before ends a moment after its peer has heard so."""
    while (answer := ask(server)).startswith(b"HTTP/1.1 503 "):
        pass
    return answer


def test_a_request_is_answered_and_the_connection_ends(running: Serve) -> None:
    answer = ask(running())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\nhello")


def test_a_head_that_never_ends_is_given_up(running: Serve) -> None:
    server = running(most=1)
    with connected(server) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert said(slow) == b""
    assert ask_when_free(server).endswith(b"hello")


def test_a_head_that_trickles_in_is_given_up_though_every_byte_is_in_time(running: Serve) -> None:
    server = running(most=1)
    stop = threading.Event()
    with connected(server) as slow:

        def trickle() -> None:
            while not stop.wait(SHORT / 10):
                try:
                    slow.send(b"a")
                except OSError:
                    return

        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        sender = threading.Thread(target=trickle)
        sender.start()
        assert said(slow) == b""
        stop.set()
        sender.join()


def test_a_head_without_end_is_given_up_before_the_time_is(running: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PATIENCE", 60)
    server = running()
    assert ask(server, b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * LONGEST_HEAD) == b""


@pytest.mark.parametrize(
    "request_line",
    [b"", b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe\r\n\r\n"],
)
def test_what_is_no_request_gets_no_page(running: Serve, request_line: bytes) -> None:
    server = running()
    with connected(server) as connection:
        connection.sendall(request_line)
        connection.shutdown(socket.SHUT_WR)
        answer = said(connection)
    assert b"hello" not in answer
    assert b"Traceback" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_only_reading_is_allowed_and_a_body_is_not_read(running: Serve, method: str) -> None:
    head = f"{method} / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    answer = ask(running(), head.encode())
    assert answer.startswith(b"HTTP/1.0 405 Method Not Allowed\r\n")
    assert b"\r\nAllow: GET, HEAD\r\n" in answer


def test_a_reader_who_does_not_read_is_hung_up_on(running: Serve) -> None:
    """The thread is free again: with one connection allowed, the next one is answered."""
    closed = threading.Event()

    class Endless:
        """A body that never ends, and tells when it is closed."""

        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b"x" * 2**20

        def close(self) -> None:
            """Tell."""
            closed.set()

    def endless(_: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return Endless()

    server = running(endless, most=1)
    with connected(server) as lazy:
        lazy.sendall(GET)
        assert closed.wait(20)


def test_one_connection_too_many_is_told_to_come_again_and_costs_no_thread(running: Serve) -> None:
    going = threading.Event()
    entered = threading.Semaphore(0)

    def held(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        entered.release()
        assert going.wait(20)
        return hello(environ, start_response)

    server = running(held, most=2)
    with connected(server) as first, connected(server) as second:
        for connection in (first, second):
            connection.sendall(GET)
            assert entered.acquire(timeout=20)
        threads = threading.active_count()
        with connected(server) as third:
            answer = said(third)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 5\r\n" in answer
        assert threading.active_count() <= threads
        going.set()
        assert said(first).endswith(b"hello")
        assert said(second).endswith(b"hello")
    assert ask_when_free(server).endswith(b"hello")


def test_a_fault_of_the_application_is_a_short_answer_and_the_next_request_is_served(
    running: Serve,
) -> None:
    faults = iter([True, False])

    def faulty(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        if next(faults):
            raise ZeroDivisionError("secret")
        return hello(environ, start_response)

    server = running(faulty)
    with structlog.testing.capture_logs() as logged:
        answer = ask(server)
        assert ask_when_free(server).endswith(b"hello")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert "page not served" in [entry["event"] for entry in logged]


def test_the_process_s_environment_is_not_the_application_s(running: Serve) -> None:
    seen: dict[str, Any] = {}

    def look(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        seen.update(environ)
        return hello(environ, start_response)

    server = running(look)
    ask(server, b"HEAD /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y: z\r\nSneaky_Header: 1\r\n\r\n")
    wanted = {"REQUEST_METHOD": "HEAD", "PATH_INFO": "/a b", "QUERY_STRING": "c=d", "HTTP_X_Y": "z"}
    assert wanted.items() <= seen.items()
    assert "PATH" not in seen
    assert "HTTP_SNEAKY_HEADER" not in seen


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


def test_a_listener_hears_of_a_change_and_leaves_its_place_when_it_hangs_up(running: Serve) -> None:
    sample = Sample()
    sample.report(namespace_use("team-a", model_use("M40", 8)))
    views = Views(lambda: NOW)
    feed = Feed(sample.source(), views, spacing=0.05, heartbeat=0.1, most=1)
    feed.start()
    server = running(create_app(lambda: Standing(feed, ""), views))
    version = feed.picture().version
    with connected(server) as listener, listener.makefile("rb") as stream:
        listener.sendall(f"GET /updates?since={version} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert b"Content-Type: text/event-stream\r\n" in await_line(stream, b"retry: 2000\n")
        sample.report(namespace_use("team-a", model_use("M40", 8, 3)))
        await_line(stream, b"event: change\n")
        assert b"<b>3</b> of 8" in stream.readline()
        assert ask(server, b"GET /updates HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 503 ")
    while (status := status_of_listening(server, version)) != b"HTTP/1.1 200 OK\r\n":
        assert status.startswith(b"HTTP/1.1 503 ")  # until a heartbeat finds nobody there
    feed.close()


def test_listeners_that_read_nothing_hold_up_neither_pages_nor_pictures(running: Serve) -> None:
    """A slow browser costs its own thread and place, for as long as the patience lasts."""
    sample, views = company(), Views(lambda: NOW)
    feed = Feed(sample.source(), views, spacing=0, heartbeat=0.01)
    feed.start()
    server = running(create_app(lambda: Standing(feed, ""), views), most=8)
    with ExitStack() as lazy:
        for _ in range(4):
            connection = lazy.enter_context(connected(server))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(b"GET /updates?since=x HTTP/1.1\r\nHost: x\r\n\r\n")
        for used in range(20):
            sample.report(namespace_use("ci", model_use("T4", 40, used)))
            assert f"<b>{used}</b> of 40".encode() in ask(server)
    feed.close()


def test_an_address_that_is_taken_is_an_error_at_once(running: Serve) -> None:
    server = running()
    with pytest.raises(OSError, match="in use"):
        serve(server.server_address[:2], hello)  # type: ignore[arg-type]  # an IPv4 address
