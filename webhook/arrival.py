"""Requests as their bytes come in: a request is served when all of it is here, so that no thread waits for a client.

gunicorn's parser decides what a request is, and where its body ends; it reads from memory alone. What is counted here
only tells when there is enough for it. Nothing here knows of sockets.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from gunicorn.http.body import Body, ChunkedReader, LengthReader
from gunicorn.http.errors import LimitRequestHeaders, NoMoreData, ParseException
from gunicorn.http.parser import RequestParser
from gunicorn.http.unreader import Unreader

if TYPE_CHECKING:
    from collections.abc import Callable

    from gunicorn.config import Config
    from gunicorn.http.message import Request

MAX_BODY = 3 * 2**20
"""Bytes. The API server takes objects up to 3 MiB, so nothing larger comes from it."""

MOST_KEPT = MAX_BODY + 2**16
"""Bytes of one body that are kept: the largest, with the lengths of its chunks."""

MOST_DISCARDED = 10 * MAX_BODY
"""Bytes of one body that are read, and thrown away, since most clients look for an answer when all of it is sent."""

MOST_HEAD = 2**16
"""Bytes of a request line and its headers; the API server's are under 1 KiB."""

_BLANK_LINE = b"\r\n\r\n"
_BARE_LF = re.compile(rb"(?<!\r)\n")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\r?", re.DOTALL)


class TooLarge(Exception):
    """A body is so large that the rest of it is not waited for."""


class Inbox(Unreader):
    """What gunicorn's parser reads from: bytes that are here already, and then the end."""

    def chunk(self, size_hint: int | None = None) -> bytes:  # noqa: ARG002  # gunicorn's call
        """Return nothing: there is no source behind the buffer."""
        return b""

    def add(self, data: bytearray) -> None:
        """Put bytes behind those that are here."""
        self.buf.seek(0, 2)
        self.buf.write(data)


class Rest(Protocol):
    """Counts what is still to come of a body; ``torn`` is one whose end cannot be found."""

    whole: bool
    torn: bool

    def take(self, data: bytearray) -> int:
        """Return how many of these bytes belong to the body."""


class RestByLength:
    """A body of known length."""

    torn = False

    def __init__(self, length: int) -> None:
        self._left = length
        self.whole = length == 0

    def take(self, data: bytearray) -> int:
        """Return how many of these bytes belong to the body."""
        taken = min(self._left, len(data))
        self._left -= taken
        self.whole = self._left == 0
        return taken


class RestByChunks:
    """A body in chunks (RFC 9112, section 7.1). One that is torn counts as whole: reading it says what is wrong."""

    def __init__(self) -> None:
        self.whole = self.torn = False
        self._skip = 0
        self._line = b""
        self._trailers = False

    def take(self, data: bytearray) -> int:
        """Return how many of these bytes belong to the body."""
        at = 0
        while at < len(data) and not self.whole:
            at = self._jump(data, at) if self._skip else self._read_line(data, at)
        return at

    def _jump(self, data: bytearray, at: int) -> int:
        step = min(self._skip, len(data) - at)
        self._skip -= step
        return at + step

    def _read_line(self, data: bytearray, at: int) -> int:
        end = data.find(b"\n", at) + 1
        self._line += data[at : end or len(data)]
        if end:
            self._end_line(self._line[:-1])
            self._line = b""
        elif len(self._line) > MOST_HEAD:
            self.whole = self.torn = True
        return end or len(data)

    def _end_line(self, line: bytes) -> None:
        if self._trailers:
            self.whole = line in (b"", b"\r")
            return
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            self.whole = self.torn = True
            return
        length = int(size[1], 16)
        self._trailers = length == 0
        self._skip = length + 2 if length else 0


class Arrival:
    """One connection's requests, one after another."""

    def __init__(self, cfg: Config, client: tuple[str, int]) -> None:
        self._inbox = Inbox()
        self._parser = RequestParser(cfg, (), client)
        self._parser.unreader = self._inbox
        self._raw = bytearray()
        self._request: Request | None = None
        self._awaits = False
        self._rest: Rest = RestByLength(0)
        self._kept = self._dropped = 0

    @property
    def held(self) -> int:
        """Bytes of requests that are not whole yet."""
        return len(self._raw) + self._kept

    @property
    def begun(self) -> bool:
        """Whether there is some of a next request."""
        return bool(self._raw) or self._request is not None

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        self._raw += data

    def awaits_continue(self) -> bool:
        """Return once, for a request with a body to come, whether its client waits to be told to send it."""
        awaits, self._awaits = self._awaits, False
        return awaits

    def next(self) -> Request | None:
        """Return the next request once all of it is here, or None.

        Raises:
            ParseException, NoMoreData: it is malformed, by gunicorn's parser.
            TooLarge: its body is far over the limit. After any of these, where a next one begins is not known.

        """
        if self._request is None and not self._begin():
            return None
        taken = self._rest.take(self._raw)
        self._keep(self._raw[:taken])
        del self._raw[:taken]
        return self._end() if self._rest.whole else None

    def finish(self) -> bool:
        """Forget the request that was served, and what was not read of it; return whether there can be a next one."""
        drain: Callable[[], bool] = self._parser.finish_body  # type: ignore[assignment]  # the stubs lack the result
        try:
            return drain() and not self._inbox.take_buffered()  # else the parser has seen another end than is counted
        except (ParseException, NoMoreData):
            return False

    def _begin(self) -> bool:
        end = _end_of_head(self._raw)
        if not end:
            return False
        self._inbox.add(self._raw[:end])
        del self._raw[:end]
        request = next(self._parser)
        self._rest = _rest_of(request)
        self._awaits = request._expected_100_continue  # type: ignore[attr-defined]  # has no public name
        request._expected_100_continue = False  # type: ignore[attr-defined]  # as gunicorn would say it again, too late
        self._request = request
        return True

    def _keep(self, data: bytearray) -> None:
        kept = data[: MOST_KEPT - self._kept]
        self._inbox.add(kept)
        self._kept += len(kept)
        self._dropped += len(data) - len(kept)
        if self._dropped > MOST_DISCARDED:
            raise TooLarge

    def _end(self) -> Request | None:
        request = self._request
        if request is not None and self._dropped:
            if self._rest.torn:
                raise TooLarge
            request.body = Body(LengthReader(self._inbox, self._kept))  # long enough for the application to refuse
        self._request = None
        self._kept = self._dropped = 0
        return request


def _end_of_head(data: bytearray) -> int:
    """Return where a head ends, or may be given up; 0 while that is not here.

    Raises:
        LimitRequestHeaders: it is too long.

    """
    blank = data.find(_BLANK_LINE, 0, MOST_HEAD)
    if blank >= 0:
        return blank + len(_BLANK_LINE)
    if len(data) >= MOST_HEAD:
        raise LimitRequestHeaders(f"the request's head is over {MOST_HEAD} bytes")
    return len(data) if _BARE_LF.search(data) else 0


def _rest_of(request: Request) -> Rest:
    reader = request.body.reader if request.body else None
    if isinstance(reader, ChunkedReader):
        return RestByChunks()
    length = reader.length if isinstance(reader, LengthReader) else 0
    if length > MOST_DISCARDED:
        raise TooLarge
    return RestByLength(length)
