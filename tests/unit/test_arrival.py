"""Requests come out whole and in order, however their bytes are cut; what is no request is told at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest
from gunicorn.config import Config
from gunicorn.http.errors import LimitRequestHeaders, ParseException
from hypothesis import given
from hypothesis import strategies as st

from webhook.arrival import MAX_BODY, MOST_DISCARDED, MOST_HEAD, Arrival, TooLarge
from webhook.faults import MALFORMED

HEAD = b"POST /mutate HTTP/1.1\r\nHost: h\r\n"


class Got(NamedTuple):
    """A request as it came out."""

    path: str
    body: bytes


def by_length(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def in_chunks(path: str, body: bytes, size: int, trailer: bytes = b"") -> bytes:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    chunks = b"".join(f"{len(part):x};ext=1\r\n".encode() + part + b"\r\n" for part in parts)
    return (
        f"POST {path} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n" + trailer + b"\r\n"
    )


def bare(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\n\r\n".encode()


def served(pieces: Iterable[bytes], *, read: bool = True) -> Iterator[Got]:
    """Feed the pieces to one connection, and yield each request when it is whole; its body is read, or left."""
    arrival = Arrival(Config(), ("127.0.0.1", 1))
    for piece in pieces:
        arrival.feed(piece)
        while arrival.begun and (request := arrival.next()):
            assert request.body
            yield Got(request.path or "", request.body.read() if read else b"")
            assert arrival.finish()
    assert not arrival.begun
    assert arrival.held == 0


def cut(stream: bytes, at: Iterable[int]) -> list[bytes]:
    """The stream in pieces, cut at these places."""
    places = [0, *sorted({place % (len(stream) + 1) for place in at}), len(stream)]
    return [stream[start:end] for start, end in pairwise(places)]


BODIES = st.binary(max_size=60) | st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", bare("/smuggled")])
TRAILERS = st.sampled_from([b"", b"X-Sum: 1\r\n", b"X-Sum: 1\r\nX-More: 2\r\n"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[Got]]:
    """Requests one behind another, as bytes and as they are meant."""
    bodies = draw(st.lists(st.none() | BODIES, min_size=1, max_size=4))
    stream, meant = b"", []
    for number, body in enumerate(bodies):
        path = f"/{number}"
        if body is None:
            stream += bare(path)
        elif draw(st.booleans()):
            stream += by_length(path, body)
        else:
            stream += in_chunks(path, body, draw(st.integers(1, 30)), draw(TRAILERS))
        meant.append(Got(path, body or b""))
    return stream, meant


@given(streams(), st.lists(st.integers(0), max_size=8))
def test_requests_come_out_the_same_wherever_their_bytes_are_cut(
    stream: tuple[bytes, list[Got]], places: list[int]
) -> None:
    sent, meant = stream
    assert list(served(cut(sent, places))) == meant


@given(streams())
def test_requests_that_come_byte_by_byte(stream: tuple[bytes, list[Got]]) -> None:
    sent, meant = stream
    assert list(served(sent[at : at + 1] for at in range(len(sent)))) == meant


@given(streams(), st.lists(st.integers(0), max_size=4))
def test_a_body_that_nobody_reads_is_not_taken_for_the_next_request(
    stream: tuple[bytes, list[Got]], places: list[int]
) -> None:
    sent, meant = stream
    assert [got.path for got in served(cut(sent, places), read=False)] == [got.path for got in meant]


@given(st.binary(max_size=200), st.lists(st.integers(0), max_size=5))
def test_raw_bytes_raise_nothing_but_what_is_answered(stream: bytes, places: list[int]) -> None:
    arrival = Arrival(Config(), ("127.0.0.1", 1))
    for piece in cut(stream, places):
        arrival.feed(piece)
        try:
            request = arrival.next()
        except MALFORMED:
            return
        assert request is None or arrival.finish() in (True, False)


def fed(stream: bytes) -> Arrival:
    arrival = Arrival(Config(), ("127.0.0.1", 1))
    arrival.feed(stream)
    return arrival


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(HEAD, id="a head"),
        pytest.param(HEAD + b"Content-Length: 5\r\n\r\n1234", id="a body"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345", id="a chunk"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\nX: 1\r\n", id="trailers"),
        pytest.param(b"\r\n", id="an empty line"),
        pytest.param(b"\x16\x03\x01\x00\xff", id="no text"),
    ],
)
def test_what_is_not_whole_waits_for_more(stream: bytes) -> None:
    arrival = fed(stream)
    assert arrival.next() is None
    assert arrival.begun
    assert arrival.held > 0


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b"GET / HTTP/1.1\n\n", id="bare line feeds"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="the preface of HTTP/2"),
        pytest.param(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", id="two lengths"),
        pytest.param(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two Content-Lengths"),
        pytest.param(HEAD + b"Content-Length: -1\r\n\r\n", id="a negative length"),
        pytest.param(HEAD + b"Content-Length: +5\r\n\r\n12345", id="a signed length"),
        pytest.param(HEAD + b"Transfer-Encoding: xchunked\r\n\r\n", id="an unknown coding"),
        pytest.param(HEAD + b"Transfer-Encoding : chunked\r\n\r\n", id="a space before the colon"),
        pytest.param(HEAD + b"Content-Length: 5\r\n Transfer-Encoding: chunked\r\n\r\n", id="a folded line"),
    ],
)
def test_what_can_be_read_in_two_ways_is_no_request(stream: bytes) -> None:
    """Where a body ends must not be open to doubt: another request could be smuggled behind it."""
    with pytest.raises(ParseException):
        fed(stream).next()


@pytest.mark.parametrize(
    "size", [b"-5", b"0x5", b"5_0", b"", b"g", b"F" * 20], ids=["minus", "0x", "_", "none", "g", "huge"]
)
def test_a_torn_chunk_is_given_out_and_ends_the_connection(size: bytes) -> None:
    """The application says what is wrong with it."""
    arrival = fed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n12345\r\n0\r\n\r\n")
    request = arrival.next()
    assert request
    assert request.body
    with pytest.raises(MALFORMED):
        request.body.read()
    assert not arrival.finish()


def test_a_torn_chunk_that_nobody_reads_ends_the_connection_too() -> None:
    arrival = fed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n12345\r\n0\r\n\r\n")
    assert arrival.next()
    assert not arrival.finish()


def test_a_head_without_end_is_given_up() -> None:
    with pytest.raises(LimitRequestHeaders):
        fed(HEAD + b"X: " + b"a" * MOST_HEAD).next()


@pytest.mark.parametrize("chunks", [False, True], ids=["by length", "in chunks"])
def test_of_a_body_over_the_limit_little_is_kept_and_the_next_request_is_found(chunks: bool) -> None:
    body = b" " * (2 * MAX_BODY)
    sent = in_chunks("/large", body, 2**16) if chunks else by_length("/large", body)
    pieces = [sent[at : at + 2**16] for at in range(0, len(sent), 2**16)]
    first, second = served([*pieces, bare("/next")])
    assert MAX_BODY < len(first.body) < MAX_BODY + 2**17
    assert second == Got("/next", b"")


def test_a_body_far_over_the_limit_is_not_even_waited_for() -> None:
    with pytest.raises(TooLarge):
        fed(HEAD + f"Content-Length: {MOST_DISCARDED + 1}\r\n\r\n".encode()).next()


def test_chunks_without_end_are_given_up() -> None:
    arrival = fed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    part = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    held = 0

    def send_all() -> None:
        nonlocal held
        for _ in range(2 * (MAX_BODY + MOST_DISCARDED) // len(part)):
            arrival.feed(part)
            arrival.next()
            held = max(held, arrival.held)

    with pytest.raises(TooLarge):
        send_all()
    assert held < MAX_BODY + 2**17


def test_a_torn_chunk_in_a_body_over_the_limit_ends_the_connection() -> None:
    """What is kept of it would be refused as too large, and what follows be taken for a request."""
    arrival = fed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % (2 * MAX_BODY) + b" " * 2 * MAX_BODY)
    assert arrival.next() is None
    arrival.feed(b"\r\n-1\r\n" + bare("/smuggled"))
    with pytest.raises(TooLarge):
        arrival.next()


def test_bytes_that_the_parser_leaves_of_a_request_end_the_connection() -> None:
    """It never does; were its count ever another one than ours, what is left must not be served."""
    arrival = fed(by_length("/mutate", b"{}"))
    assert arrival.next()
    arrival._inbox.add(bytearray(bare("/smuggled")))
    assert not arrival.finish()


def test_a_client_that_waits_to_be_told_to_send_is_told_once() -> None:
    arrival = fed(HEAD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert arrival.next() is None
    assert arrival.awaits_continue()
    assert not arrival.awaits_continue()
    arrival.feed(b"{}")
    request = arrival.next()
    assert request
    assert not request._expected_100_continue  # type: ignore[attr-defined]  # gunicorn would say it again
