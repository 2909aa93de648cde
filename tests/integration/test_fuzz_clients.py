"""Tests that the webhook answers valid requests while other clients are slow, silent or many, or send large bodies."""

import json
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.integration.fuzzing import GOOD, SECONDS, Target, answers_in, for_a_while, read_all, under_fire
from tests.integration.reviews import card_pod, review_of
from webhook.server.server import MAX_CONNECTIONS

pytestmark = pytest.mark.slow

FEW = 4
CROWD = 8 * FEW
IDLE = 10_000
SHARE = 0.3
LATER = 12
"""Another client begins a request after this many half seconds. The first client's time limit is not over then."""

HEAD = b"POST /mutate HTTP/1.1\r\nHost: webhook\r\nContent-Type: application/json\r\n"
ASKING = b"GET /metrics HTTP/1.1\r\nHost: webhook\r\n\r\n"


@pytest.fixture
def crowd() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hello() -> bytes:
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(coming, going, server_hostname="webhook").do_handshake()
    return going.read()


def having_sent(data: bytes, connection: socket.socket) -> socket.socket:
    connection.sendall(data)
    return connection


def no_reader(target: Target) -> socket.socket:
    """Return the connection of a client that sends many requests and reads no answer. All buffers are full."""
    connection = target.shake_hands(receive_buffer=2304)
    connection.setblocking(False)
    with suppress(ssl.SSLWantWriteError):
        for _ in range(4000):
            connection.send(ASKING)
    return connection


Open = Callable[[Target], socket.socket]

KINDS: dict[str, Open] = {
    "silent": lambda target: target.open(),
    "half a hello": lambda target: having_sent(hello()[:50], target.open()),
    "half a handshake": lambda target: having_sent(hello(), target.open()),
    "unused": lambda target: target.shake_hands(),
    "half a head": lambda target: having_sent(HEAD, target.shake_hands()),
    "half a body": lambda target: having_sent(
        HEAD + b"Content-Length: 3000000\r\n\r\n" + b" " * 2_900_000, target.shake_hands()
    ),
    "half a chunk": lambda target: having_sent(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n{", target.shake_hands()
    ),
    "no reader": no_reader,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_crowd_does_not_delay_good_requests(target: Target, crowd: ExitStack, kind: str) -> None:
    used = target.kept.sock
    for _ in range(CROWD):
        crowd.enter_context(KINDS[kind](target))
    for _ in range(5):
        target.assert_sound()
    target.assert_kept(used)


def test_a_request_that_does_not_arrive_in_time_gets_408(target: Target) -> None:
    """Each request has its own time limit. A request that another client began later is still in time."""
    with target.shake_hands() as connection, ExitStack() as crowd:
        connection.sendall(HEAD)
        data, turns = b"", 0
        while not data:
            data = trickle(connection)
            turns += 1
            if turns == LATER:
                later = crowd.enter_context(KINDS["half a head"](target))
        rest, _ = read_all(connection)
        later.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            later.recv(1)
    (answer,) = answers_in(data + rest)
    assert answer.status == HTTPStatus.REQUEST_TIMEOUT
    assert target.server.metric("vcuda_requests_overdue_total") > 0


def trickle(connection: ssl.SSLSocket) -> bytes:
    connection.settimeout(0.5)
    try:
        connection.sendall(b"X: a\r\n")
        return connection.recv(2**16)
    except TimeoutError:
        return b""


def test_incomplete_bodies_of_all_clients_together_are_bounded(target: Target, crowd: ExitStack) -> None:
    """If the incomplete bodies are too large together, the server ends the oldest requests with 408."""
    before = target.note_memory("before halves of bodies")
    many = 2 * CROWD
    held = [crowd.enter_context(KINDS["half a body"](target)) for _ in range(many)]
    (answer,) = answers_in(read_all(held[0])[0])
    assert answer.status == HTTPStatus.REQUEST_TIMEOUT
    target.assert_sound()
    assert target.note_memory(f"with {many} halves of bodies of 2.9 MB") - before < 150


def read_beneath(connection: socket.socket) -> None:
    """Read the raw bytes of the connection to the end. A TLS connection would hide a reset."""
    while socket.socket.recv(connection, 2**16):
        pass


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["silent", "unused"])
def test_ten_thousand_idle_connections_do_not_block_new_clients(target: Target, crowd: ExitStack, kind: str) -> None:
    """If there are too many connections, the server resets the oldest idle ones, and none that is in use."""
    used, most = target.kept.sock, MAX_CONNECTIONS
    many = IDLE if kind == "silent" or SECONDS > 60 else CROWD
    before = target.server.metric("vcuda_connections_shed_total")
    held = []
    for number in range(many):
        held.append(crowd.enter_context(KINDS[kind](target)))
        if number % 500 == 0:
            target.assert_sound()
    target.assert_sound()
    target.assert_kept(used)
    assert target.server.metric("vcuda_connections") <= most
    if many == IDLE:
        assert target.server.metric("vcuda_connections_shed_total") - before >= IDLE - most
        with pytest.raises(ConnectionResetError):
            read_beneath(held[0])
    target.note_memory(f"with {many} {kind} connections opened")


def test_clients_that_leave_while_others_connect_do_no_harm(target: Target) -> None:
    """One pass of the server's event loop gets both new connections and the ends of connections that it closes."""
    with ExitStack() as crowd:
        held = [crowd.enter_context(target.open()) for _ in range(MAX_CONNECTIONS)]
        for connection in held:
            connection.close()
            crowd.enter_context(target.open())
    target.assert_sound()
    assert target.server.worker() == target.pid


@pytest.mark.timeout(900)
def test_memory_does_not_grow_with_repeated_crowds(target: Target) -> None:
    """At the end, some clients disconnect at once, and others first send more bytes."""

    seen: list[int] = []

    def come_and_go() -> None:
        with ExitStack() as stack:
            held = [stack.enter_context(kind(target)) for kind in KINDS.values() for _ in range(FEW)]
            target.assert_sound()
            for connection in held[::2]:
                connection.setblocking(False)
                with suppress(OSError):
                    connection.send(GOOD.encode() + b"\r\n\r\n")
        target.assert_sound()
        seen.append(target.memory("VmRSS"))

    for_a_while(2 * SHARE, come_and_go)
    quarter = len(seen) // 4
    # The process keeps memory that the first clients needed. So the last quarter of the readings is compared with the
    # quarter before. The minimum of each quarter counts, because one reading may be a peak.
    before, after = min(seen[2 * quarter : 3 * quarter]), min(seen[3 * quarter :])
    print(
        f"resident memory after {len(seen)} crowds of {len(KINDS) * FEW}: {after} MiB, a quarter of them ago {before}"
    )
    assert after - before < 32


def test_the_memory_of_a_connection_is_free_as_soon_as_it_closes(target: Target) -> None:
    """The memory must be free before the time limit of the incomplete request is over."""

    def come_and_go() -> None:
        with ExitStack() as stack:
            for _ in range(CROWD):
                stack.enter_context(KINDS["half a head"](target))

    come_and_go()
    before = target.note_memory("after one crowd")
    for _ in range(30):
        come_and_go()
    assert target.note_memory("after thirty more") - before < 25


def slow_large(target: Target) -> socket.socket:
    """Return a connection that has sent the first part of a large body, which waits behind other large reviews."""
    connection = target.shake_hands()
    connection.setblocking(False)
    with suppress(ssl.SSLWantWriteError):
        connection.send(HEAD + b"Content-Length: 2900000\r\n\r\n")
        for _ in range(160):
            connection.send(b" " * 2**14)
    return connection


def test_a_thousand_senders_that_stop_short_of_a_large_body_take_less_than_132_mib(tmp_path: Path) -> None:
    """The server first reads a part of each large body, and bounds the bytes of all incomplete bodies together."""
    with under_fire(tmp_path) as target, ExitStack() as crowd:
        before = target.memory("VmRSS")
        for _ in range(1000):
            crowd.enter_context(
                having_sent(HEAD + b"Content-Length: 60000\r\n\r\n" + b" " * 59_000, target.shake_hands())
            )
        target.assert_sound()
        assert target.memory("VmHWM") - before < 132


def large_review() -> bytes:
    pod = card_pod("large", "steady")
    pod["spec"]["containers"][0]["env"] = [{"name": f"SETTING_{n}", "value": "x" * 80} for n in range(25_000)]
    return json.dumps(review_of(pod)).encode()


@pytest.mark.timeout(300)
def test_concurrent_large_reviews_with_silent_and_slow_clients_take_less_than_132_mib(tmp_path: Path) -> None:
    review = large_review()
    with under_fire(tmp_path) as target, ExitStack() as crowd, ThreadPoolExecutor(CROWD) as pool:
        before = target.memory("VmRSS")
        for _ in range(1000):
            crowd.enter_context(target.open())
        for kind in (KINDS["half a head"], KINDS["half a chunk"], slow_large):
            for _ in range(FEW):
                crowd.enter_context(kind(target))
        sent = [pool.submit(target.server.send, "POST", "/mutate?timeout=30s", review) for _ in range(CROWD)]
        while not all(each.done() for each in sent):
            target.assert_sound()
        assert Counter(each.result().status for each in sent) == {HTTPStatus.OK: CROWD}
        target.note_memory("with everything at once")
        assert target.memory("VmHWM") - before < 132
