"""A load of kept TLS connections: as little work as can be on this side, so that the server is what is measured."""

from __future__ import annotations

import itertools
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

END_OF_CHUNKS = b"\r\n0\r\n\r\n"


class Result(NamedTuple):
    """Requests a second, two percentiles of the time for one, in milliseconds, and how many these are.

    Beside them, how many were refused.
    """

    rate: float
    p50: float
    p99: float
    wanted: int
    refused: int


def post(url: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return one POST of JSON as it goes over the wire."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    fields = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def run(
    server: str, ca: Path, requests: Sequence[bytes], *, seconds: float, wanted: HTTPStatus = HTTPStatus.OK
) -> Result:
    """Send each request over and over to the server with this URL, on a connection of its own, all at once."""
    with connected(server, ca, len(requests)) as connections:
        return run_over(connections, [[request] for request in requests], seconds=seconds, wanted=wanted)


@contextmanager
def connected(server: str, ca: Path, count: int) -> Iterator[list[ssl.SSLSocket]]:
    """So many connections to the server with this URL."""
    with ExitStack() as stack:
        yield [stack.enter_context(_connect(server, ca)) for _ in range(count)]


def run_over(
    connections: Sequence[ssl.SSLSocket], requests: Sequence[Sequence[bytes]], *, seconds: float, wanted: HTTPStatus
) -> Result:
    """Send the requests in turn, over and over, on the connection in their place, all at once."""
    started = time.perf_counter()
    log = _Log(wanted, started + seconds, [], [])
    threads = [
        threading.Thread(target=_send, args=(connection, turn, log))
        for connection, turn in zip(connections, requests, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, refused = time.perf_counter() - started, len(log.refusals)
    if len(log.times) <= refused:
        raise RuntimeError(f"{refused} refused, only {len(log.times)} not; the first: {log.refusals[:1]}")
    cuts = statistics.quantiles(log.times, n=100)
    return Result(len(log.times) / took, cuts[49] * 1000, cuts[98] * 1000, len(log.times), refused)


def send_each(server: str, ca: Path, requests: Iterable[bytes], *, connections: int, wanted: HTTPStatus) -> None:
    """Send every request once, over so many connections. Raises RuntimeError for an answer that is not as wanted."""
    left, taking = iter(requests), threading.Lock()

    def work() -> None:
        with _connect(server, ca) as connection:
            while True:
                with taking:
                    request = next(left, None)
                if request is None:
                    return
                connection.sendall(request)
                answer = _read_answer(connection)
                if int(answer[9:12]) != wanted:
                    raise RuntimeError(f"refused: {answer!r}")

    with ThreadPoolExecutor(connections) as threads:
        for done in [threads.submit(work) for _ in range(connections)]:
            done.result()


class _Log(NamedTuple):
    """What the connections share: the status wanted, when to stop, seconds of each answer wanted, and other answers."""

    wanted: int
    deadline: float
    times: list[float]
    refusals: list[bytes]


def _send(connection: ssl.SSLSocket, turn: Sequence[bytes], log: _Log) -> None:
    for request in itertools.cycle(turn):
        if (started := time.perf_counter()) >= log.deadline:
            return
        connection.sendall(request)
        answer = _read_answer(connection)
        if int(answer[9:12]) == log.wanted:
            log.times.append(time.perf_counter() - started)
        else:
            log.refusals.append(answer)


def _connect(server: str, ca: Path) -> ssl.SSLSocket:
    parts = urlsplit(server)
    raw = socket.create_connection((parts.hostname, parts.port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ssl.create_default_context(cafile=str(ca)).wrap_socket(raw, server_hostname=parts.hostname)


def _read_answer(connection: ssl.SSLSocket) -> bytes:
    """Read one answer, sent whole or in chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    while not (body.endswith(END_OF_CHUNKS) if length is None else len(body) >= length):
        body += _more(connection)
    return head + b"\r\n\r\n" + body


def _more(connection: ssl.SSLSocket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise RuntimeError("the server closed the connection")
    return data
