"""Sends many requests over open TLS connections. The client does little work, so that the server limits the rate."""

from __future__ import annotations

import itertools
import json
import socket
import ssl
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

END_OF_CHUNKS = b"\r\n0\r\n\r\n"

RETRY_SECONDS = 0.2
"""Seconds until a request is sent again after an answer 429."""


class Result(NamedTuple):
    """The result of a load.

    ``rate``: the answers per second with the wanted status.
    ``p50``, ``p99``: percentiles of the latency of these answers, in milliseconds.
    ``wanted``: the number of answers with the wanted status.
    ``rejected``: the number of answers with another status.
    ``releasing``: the number of rejected answers that say that quota is being released.
    ``deleted``: the number of objects that were deleted during the load.
    """

    rate: float
    p50: float
    p99: float
    wanted: int
    rejected: int
    releasing: int = 0
    deleted: int = 0


class Life(NamedTuple):
    """The requests by which one connection creates and deletes its objects, and their limits.

    ``create``: the request that creates an object.
    ``delete``: returns the request that deletes the object with this name.
    ``most``: the maximum number of stored objects of this connection. When it is exceeded, the oldest is deleted.
    ``pause``: the seconds to wait after a create that failed.
    """

    create: bytes
    delete: Callable[[str], bytes]
    most: int
    pause: float


def post(url: str, body: bytes, headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    """Return the bytes of one HTTP request, by default POST, with a JSON body."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    fields = {"Host": parts.netloc, "Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode() + body


def run(
    server: str, ca: Path, requests: Sequence[bytes], *, seconds: float, wanted: HTTPStatus = HTTPStatus.OK
) -> Result:
    """Repeat each request for ``seconds`` seconds, in its own thread and connection. ``server``: the server's URL."""
    with connected(server, ca, len(requests)) as connections:
        return run_over(connections, [[request] for request in requests], seconds=seconds, wanted=wanted)


@contextmanager
def connected(server: str, ca: Path, count: int) -> Iterator[list[ssl.SSLSocket]]:
    """Yield ``count`` open TLS connections to the server at this URL."""
    with ExitStack() as stack:
        yield [stack.enter_context(_connect(server, ca)) for _ in range(count)]


def run_over(
    connections: Sequence[ssl.SSLSocket], requests: Sequence[Sequence[bytes]], *, seconds: float, wanted: HTTPStatus
) -> Result:
    """Send requests over all connections at the same time. Each connection repeats its own list of requests."""
    with _logged(wanted, seconds) as log:
        _in_threads([partial(_send, *each, log) for each in zip(connections, requests, strict=True)])
    rejected = len(log.rejections)
    if len(log.times) <= rejected:
        raise RuntimeError(
            f"{rejected} of {rejected + len(log.times)} requests were rejected, first: {log.rejections[:1]}"
        )
    return _result(log)


def run_ending(connections: Sequence[ssl.SSLSocket], lives: Sequence[Life], *, seconds: float) -> Result:
    """Create and delete objects over all connections at the same time. ``lives``: one item for each connection."""
    with _logged(HTTPStatus.CREATED, seconds) as log:
        _in_threads([partial(_live, *each, log) for each in zip(connections, lives, strict=True)])
    return _result(log)


def send_each(server: str, ca: Path, requests: Iterable[bytes], *, connections: int, wanted: HTTPStatus) -> None:
    """Send every request, over ``connections`` connections, and again after an answer 429.

    Raises RuntimeError if another status is not ``wanted``.
    """
    left, taking = iter(requests), threading.Lock()

    def work() -> None:
        with _connect(server, ca) as connection:
            while True:
                with taking:
                    request = next(left, None)
                if request is None:
                    return
                answer = _answer_to(connection, request)
                while _status(answer) == HTTPStatus.TOO_MANY_REQUESTS:
                    time.sleep(RETRY_SECONDS)
                    answer = _answer_to(connection, request)
                if _status(answer) != wanted:
                    raise RuntimeError(f"a request was rejected: {answer!r}")

    _in_threads([work] * connections)


@dataclass
class _Log:
    """The shared state of all connections of a load.

    ``wanted``: the status of a successful answer.
    ``started``, ``deadline``, ``ended``: seconds of `time.perf_counter`.
    ``times``: the latency of each successful answer in seconds.
    ``rejections``: the answers with another status.
    ``deleted``: the names of the deleted objects.
    """

    wanted: int
    started: float
    deadline: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    rejections: list[bytes] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)


@contextmanager
def _logged(wanted: HTTPStatus, seconds: float) -> Iterator[_Log]:
    started = time.perf_counter()
    log = _Log(wanted, started, started + seconds)
    yield log
    log.ended = time.perf_counter()


def _in_threads(work: Sequence[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(work)) as threads:
        for done in [threads.submit(each) for each in work]:
            done.result()


def _result(log: _Log) -> Result:
    cuts = statistics.quantiles(log.times, n=100)
    return Result(
        len(log.times) / (log.ended - log.started),
        cuts[49] * 1000,
        cuts[98] * 1000,
        len(log.times),
        len(log.rejections),
        sum(b"being released" in answer for answer in log.rejections),
        len(log.deleted),
    )


def _live(connection: ssl.SSLSocket, life: Life, log: _Log) -> None:
    stored: deque[str] = deque()
    while (started := time.perf_counter()) < log.deadline:
        answer = _answer_to(connection, life.create)
        if _status(answer) == log.wanted:
            log.times.append(time.perf_counter() - started)
            stored.append(json.loads(answer.partition(b"\r\n\r\n")[2])["metadata"]["name"])
        else:
            log.rejections.append(answer)
            time.sleep(life.pause)
        if len(stored) > life.most:
            log.deleted.append(stored.popleft())
            answer = _answer_to(connection, life.delete(log.deleted[-1]))
            if _status(answer) != HTTPStatus.OK:
                raise RuntimeError(f"an object could not be deleted: {answer!r}")


def _answer_to(connection: ssl.SSLSocket, request: bytes) -> bytes:
    connection.sendall(request)
    return _read_answer(connection)


def _status(answer: bytes) -> int:
    return int(answer[9:12])


def _send(connection: ssl.SSLSocket, turn: Sequence[bytes], log: _Log) -> None:
    for request in itertools.cycle(turn):
        if (started := time.perf_counter()) >= log.deadline:
            return
        answer = _answer_to(connection, request)
        if _status(answer) == log.wanted:
            log.times.append(time.perf_counter() - started)
        else:
            log.rejections.append(answer)


def _connect(server: str, ca: Path) -> ssl.SSLSocket:
    parts = urlsplit(server)
    raw = socket.create_connection((parts.hostname, parts.port))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ssl.create_default_context(cafile=str(ca)).wrap_socket(raw, server_hostname=parts.hostname)


def _read_answer(connection: ssl.SSLSocket) -> bytes:
    """Read one HTTP answer, which has a Content-Length or is sent in chunks."""
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
