"""A load of kept TLS connections: as little work as can be on this side, so that the server is what is measured."""

from __future__ import annotations

import socket
import ssl
import statistics
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit


class Result(NamedTuple):
    """Requests a second, and two percentiles of the time for one, in milliseconds."""

    rate: float
    p50: float
    p99: float


def request_bytes(url: str, body: bytes) -> bytes:
    """Return one POST as it goes over the wire."""
    parts = urlsplit(url)
    head = (
        f"POST {parts.path}?timeout=10s HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def run(url: str, ca: Path, body: bytes, *, connections: int, seconds: float) -> Result:
    """Send the same review over and over, on so many connections at once."""
    deadline = time.perf_counter() + seconds
    times: list[float] = []
    threads = [threading.Thread(target=_send, args=(url, ca, body, deadline, times)) for _ in range(connections)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuts = statistics.quantiles(times, n=100)
    return Result(len(times) / (time.perf_counter() - started), cuts[49] * 1000, cuts[98] * 1000)


def _send(url: str, ca: Path, body: bytes, deadline: float, times: list[float]) -> None:
    parts = urlsplit(url)
    request = request_bytes(url, body)
    context = ssl.create_default_context(cafile=str(ca))
    with (
        socket.create_connection((parts.hostname, parts.port)) as raw,
        context.wrap_socket(raw, server_hostname=parts.hostname) as connection,
    ):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (started := time.perf_counter()) < deadline:
            connection.sendall(request)
            _read_answer(connection)
            times.append(time.perf_counter() - started)


def _read_answer(connection: ssl.SSLSocket) -> None:
    """Read one answer; anything but 200 with a length means the measurement is void."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {head[:80]!r}")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    missing = length - len(body)
    while missing > 0:
        missing -= len(_more(connection))


def _more(connection: ssl.SSLSocket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise RuntimeError("the server closed the connection")
    return data
