"""Tests of clients that send bytes that are not HTTP, or ambiguous HTTP.

The server gives each request one answer in JSON, and then closes the connection.
"""

from collections import Counter
from http import HTTPStatus

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.integration.fuzzing import GOOD, Target, answers_in, assert_harmless, for_a_while, read_all

pytestmark = pytest.mark.slow

EXAMPLES = 80
SHARE = 0.3
AWHILE = 0.25
"""Seconds that a test client waits for an answer, if the server may send none because it waits for more input."""

HOST = b"Host: webhook\r\n"
JSON_HEADER = b"Content-Type: application/json\r\n"
CLOSING = b"GET /healthz HTTP/1.1\r\nHost: webhook\r\nConnection: close\r\n\r\n"
SMUGGLED = b"GET /metrics HTTP/1.1\r\nHost: smuggled\r\n\r\n"
REVIEW = GOOD.encode()


def post(*headers: bytes, body: bytes = b"", path: bytes = b"/mutate") -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"POST " + path + b" HTTP/1.1\r\n" + HOST + JSON_HEADER + lines + b"\r\n" + body


def sized(length: int) -> bytes:
    return f"Content-Length: {length}".encode()


def upgrade(protocol: bytes) -> bytes:
    keys = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHTTP2-Settings: AAMAAABk\r\n"
    asked = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\n"
    return b"GET /healthz HTTP/1.1\r\n" + HOST + asked + keys + b"\r\n"


CHUNKED = b"Transfer-Encoding: chunked"
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(REVIEW), REVIEW)

BAD, LONG, MANY = HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_URI_TOO_LONG, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
LARGE, UNKNOWN = HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.NOT_IMPLEMENTED

SHAPES = {
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [BAD]),
    "no HTTP": (b"\0\1\2\3\r\n\r\n", [BAD]),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", [BAD]),
    "HTTP/9.9": (b"GET /healthz HTTP/9.9\r\n\r\n", [BAD]),
    "bare line feeds": (b"GET /healthz HTTP/1.1\nHost: a\n\n", [BAD]),
    "a long line": (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", [LONG]),
    "a long header": (b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", [MANY]),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 200 + b"\r\n", [MANY]),
    "a header without end": (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000, [MANY]),
    "NUL in a header": (b"GET / HTTP/1.1\r\nX: a\0b\r\n\r\n", [BAD]),
    "a space in a name": (b"GET / HTTP/1.1\r\nX Y: a\r\n\r\n", [BAD]),
    "a folded header": (b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n", [BAD]),
    "an expectation": (post(b"Expect: a miracle", sized(2), body=b"{}") + CLOSING, [BAD, 200]),
    "an unknown coding": (post(b"Transfer-Encoding: zip", body=b"{}"), [UNKNOWN]),
    "CL.CL": (post(sized(2), sized(60), body=b"{}" + SMUGGLED), [BAD]),
    "CL,CL": (post(b"Content-Length: 2, 60", body=b"{}" + SMUGGLED), [BAD]),
    "CL.TE": (post(sized(6), CHUNKED, body=b"0\r\n\r\n" + SMUGGLED), [BAD]),
    "TE.CL": (post(CHUNKED, sized(4), body=b"5c\r\n" + SMUGGLED), [BAD]),
    "TE.TE": (post(CHUNKED, b"Transfer-Encoding: identity", body=IN_CHUNKS), [BAD]),
    "TE with a tab": (post(b"Transfer-Encoding:\x0bchunked", body=IN_CHUNKS), [BAD]),
    "TE in HTTP/1.0": (post(CHUNKED, body=IN_CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"), [BAD]),
    "a huge length": (post(sized(10**30), body=b" " * 2**17), [LARGE]),
    "a negative length": (post(b"Content-Length: -2", body=b"{}"), [BAD]),
    "a length in hex": (post(b"Content-Length: 0x2", body=b"{}"), [BAD]),
    "a length with a digit that is not ASCII": (post("Content-Length: ²".encode("latin-1"), body=b"{}"), [BAD]),
    "a torn chunk": (post(CHUNKED, body=b"zz\r\n{}\r\n0\r\n\r\n" + SMUGGLED), [BAD]),
    "a negative chunk": (post(CHUNKED, body=b"-2\r\n{}\r\n0\r\n\r\n" + SMUGGLED), [BAD]),
    "a chunk too short": (post(CHUNKED, body=b"1\r\n{}\r\n0\r\n\r\n" + SMUGGLED), [BAD]),
    "a forbidden trailer": (post(CHUNKED, body=IN_CHUNKS[:-2] + b"Content-Length: 9\r\n\r\n"), [BAD]),
    "a malformed chunk in a body that is not read": (post(CHUNKED, body=b"zz\r\n", path=b"/healthz") + SMUGGLED, [BAD]),
    "CONNECT": (b"CONNECT webhook:443 HTTP/1.1\r\nHost: webhook\r\n\r\n" + SMUGGLED, [HTTPStatus.NOT_FOUND]),
    "a forged script name": (b"GET /healthz HTTP/1.1\r\nSCRIPT_NAME: /x\r\n\r\n" + CLOSING, [200, 200]),
    "an absolute target": (b"GET http://a/healthz HTTP/1.1\r\n" + HOST + b"\r\n" + CLOSING, [404, 200]),
    "an upgrade to WebSocket": (upgrade(b"websocket") + CLOSING, [BAD, 200]),
    "an upgrade to HTTP/2": (upgrade(b"h2c") + CLOSING, [200, 200]),
    "a short length": (post(sized(1), body=b"{}") + CLOSING, [BAD, BAD]),
    "reviews in one go": ((post(sized(len(REVIEW)), body=REVIEW) * 3) + CLOSING, [200] * 4),
    "a review in chunks": (post(CHUNKED, body=IN_CHUNKS) + CLOSING, [200, 200]),
    "a body of GET": (b"GET /healthz HTTP/1.1\r\nContent-Length: 7\r\n\r\nGET / x" + CLOSING, [200, 200]),
    "who waits to send": (post(b"Expect: 100-continue", sized(len(REVIEW)), body=REVIEW) + CLOSING, [200, 200]),
}


@pytest.mark.parametrize(("sent", "wanted"), SHAPES.values(), ids=SHAPES.keys())
def test_each_request_gets_exactly_its_answers(target: Target, sent: bytes, wanted: list[int]) -> None:
    """The server must never parse bytes of a body as a request."""
    with target.shake_hands() as connection:
        connection.sendall(sent)
        data, closed = read_all(connection)
    assert [answer.status for answer in answers_in(data)] == wanted
    assert closed
    target.assert_sound()


def test_a_client_with_expect_gets_100_continue(target: Target) -> None:
    with target.shake_hands() as connection:
        connection.sendall(post(b"Expect: 100-continue", b"Connection: close", sized(len(REVIEW))))
        assert connection.recv(2**10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(REVIEW)
        (answer,) = answers_in(read_all(connection)[0])
    assert answer.status == HTTPStatus.OK
    assert b"JSONPatch" in answer.body


def test_a_wrong_method_is_answered_with_the_right_one(target: Target) -> None:
    assert target.server.get("/validate").headers["Allow"] == "POST"
    assert target.server.send("DELETE", "/metrics").headers["Allow"] == "GET, HEAD"


def test_plain_http_and_other_bytes_instead_of_a_handshake_do_no_harm(target: Target) -> None:
    for sent in (CLOSING, b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, b"\x80\x2e\x01\x00\x02", b"\n"):
        with target.open() as connection:
            connection.sendall(sent)
            connection.settimeout(AWHILE)
            assert_harmless(read_all(connection)[0])
        target.assert_sound()


SEPARATORS = [b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b":", b"\0"]
PIECES = st.sampled_from([*SEPARATORS, b"0\r\n\r\n", b"5\r\n", b"\xff" * 9, CHUNKED + b"\r\n", HOST])
LENGTHS = st.integers(-1, len(REVIEW) + 20).map(lambda length: sized(length) + b"\r\n")
WHOLE = st.sampled_from([shape for shape, _ in SHAPES.values() if len(shape) < 4096])
NOISE = st.one_of(st.binary(max_size=300), PIECES, LENGTHS, WHOLE)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    stream = b"".join(draw(st.lists(NOISE, min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 4))):
        at, more = draw(st.integers(0, len(stream))), draw(NOISE)
        stream = stream[:at] + draw(st.sampled_from([more, b"", stream[at : at + 20]])) + stream[at + len(more) :]
    return stream + CLOSING


@pytest.mark.timeout(900)
def test_any_bytes_are_answered_in_json_and_the_next_client_is_served(target: Target) -> None:
    counts: Counter[int] = Counter()

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(streams(), st.integers(1, 3))
    def send(stream: bytes, pieces: int) -> None:
        with target.shake_hands() as connection:
            connection.settimeout(AWHILE)
            try:
                for at in range(pieces):
                    connection.sendall(stream[at * len(stream) // pieces : (at + 1) * len(stream) // pieces])
            except ConnectionError:  # the server has closed the connection before the end of the stream
                return
            data, _ = read_all(connection)
        counts.update(answer.status for answer in answers_in(data))
        target.assert_sound()

    send()
    before = target.note_memory("before raw bytes")
    times = for_a_while(SHARE, send)
    after = target.note_memory(f"after {times * EXAMPLES} more: {sorted(counts.items())}")
    assert {HTTPStatus.OK, HTTPStatus.BAD_REQUEST} <= counts.keys()
    assert HTTPStatus.INTERNAL_SERVER_ERROR not in counts
    assert after - before < 32
