"""Bytes off the wire: answers with a deadline, and streams of lines that another thread can end."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from types import TracebackType

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, ReadTimeoutError

from vcuda.errors import Unavailable

_CHUNK = 64 * 1024  # bytes; one read of the socket, so that a line is seen as soon as it is there


@contextlib.contextmanager
def transport(what: str) -> Iterator[None]:
    """Turn every way a connection can fail into Unreachable; ``what`` is the request, for the message."""
    try:
        yield
    except (HTTPError, OSError) as error:
        raise Unavailable(f"{what}: {type(error).__name__}: {error}") from error


def read_body(response: BaseHTTPResponse, deadline: float) -> bytes:
    """Read the whole body until ``deadline`` (time.monotonic seconds); TimeoutError past it, HTTPError when cut short.

    urllib3's own timeout starts again with every read, so a server that drips would never meet it.
    """
    parts: list[bytes] = []
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            response.close()
            raise TimeoutError("the body did not arrive in time")
        _limit(response, remaining)
        part = response.read1(_CHUNK, decode_content=False)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _limit(response: BaseHTTPResponse, seconds: float) -> None:
    """Set the socket's timeout; where the server closes after its answer, the connection keeps no socket to set."""
    sock = getattr(response.connection, "sock", None)
    if sock is not None:
        sock.settimeout(seconds)


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream without their newline, however they are cut into chunks; blank ones are left out.

    Bytes only: 0x0A is never part of a longer UTF-8 character. Each byte is copied at most twice, also where one
    line comes in a hundred chunks. Raises Unreachable where the stream ends inside a line.
    """
    parts: list[bytes] = []
    for chunk in chunks:
        head, *tail = chunk.split(b"\n")
        parts.append(head)
        for piece in tail:
            line = b"".join(parts)
            parts = [piece]
            if line:
                yield line
    if any(parts):
        raise Unavailable("the stream ended inside a line")


class Stream:
    """The lines of one streaming answer: read by one thread, ended by any with ``abort``.

    It is a context manager; leaving it closes the answer. A second descriptor of the same socket serves to end it:
    closing a socket does not wake the thread that reads it, shutting it down does; and a descriptor of our own cannot
    have been closed and given to another file in between.
    """

    def __init__(self, response: BaseHTTPResponse, what: str) -> None:
        self._response = response
        self._what = what
        self._socket = socket.socket(fileno=os.dup(response.fileno()))

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()
        self._socket.close()

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines until the server ends the stream or is silent for the read timeout; Unreachable where it breaks.

        Silence cannot be told from a connection that died without a word; either way the reader asks anew.
        """
        with transport(self._what):
            yield from split_lines(self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        with contextlib.suppress(ReadTimeoutError):
            while chunk := self._response.read1(_CHUNK, decode_content=False):
                yield chunk

    def abort(self) -> None:
        """End the stream now, from any thread; the reader sees it end or break. Harmless when already over."""
        with contextlib.suppress(OSError):  # not connected any more, or closed: there is no reader to wake
            self._socket.shutdown(socket.SHUT_RDWR)
