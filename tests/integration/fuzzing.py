"""A server to be sent anything, and what must hold whatever it is sent: JSON, no trace, and good requests answered."""

import json
import os
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPSConnection
from pathlib import Path
from typing import NamedTuple

from tests.integration.reviews import card_pod, pinned, review_of, with_uid
from tests.processes import PATIENCE, WebhookProcess, exchange, serving

SECONDS = float(os.environ.get("FUZZ_SECONDS", "12"))
"""How long all fuzzing may take together; `make fuzz` gives it ten minutes."""

QUOTA = "{steady: {quota: {M40: 8}}, full: {quota: {M40: 0, P100: 0, A100: 0}}, roomy: {quota: {M40: 100000}}}"

GOOD = json.dumps(review_of(card_pod("good", "steady")))
TOO_MUCH = json.dumps(review_of(with_uid(pinned(card_pod("too-much", "steady", cards=9)))))

_STATUS = re.compile(rb"HTTP/1\.\d (\d{3}) [^\r\n]+\r\n")
_TRACES = (b"Traceback", b'File "', b"<html")


class Answer(NamedTuple):
    """One answer off the wire, checked to be one."""

    status: int
    head: bytes
    body: bytes


@dataclass
class Target:
    """The server under fire, and a caller like the API server that keeps its connection to it."""

    server: WebhookProcess
    kept: HTTPSConnection
    pid: int

    def assert_sound(self) -> None:
        """Good requests are answered properly, on a connection that was kept and on a new one."""
        for connection in (self.kept, self.server.connect()):
            response = exchange(connection, "POST", "/mutate", GOOD).decoded()["response"]
            assert response["allowed"], response
            assert response["patchType"] == "JSONPatch"
            verdict = exchange(connection, "POST", "/validate", TOO_MUCH).decoded()["response"]
            assert verdict["status"]["code"] == HTTPStatus.FORBIDDEN
            if connection is not self.kept:
                connection.close()

    def assert_kept(self, used: socket.socket | None) -> None:
        """The kept connection is still the same one: http.client would open another without a word."""
        assert used is not None
        assert self.kept.sock is used

    def open(self, receive_buffer: int | None = None) -> socket.socket:
        """A TCP connection, without a handshake."""
        parts = urllib.parse.urlsplit(self.server.url)
        raw = socket.socket()
        raw.settimeout(PATIENCE)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.connect((parts.hostname, parts.port))
        return raw

    def shake_hands(self, receive_buffer: int | None = None) -> ssl.SSLSocket:
        """A TLS connection."""
        return self.server.tls.wrap_socket(self.open(receive_buffer), server_hostname="127.0.0.1")

    def note_memory(self, when: str) -> int:
        """Print, and return, the memory that the worker has resident, in MiB."""
        now = self.memory("VmRSS")
        print(f"resident memory {when}: {now} MiB")
        return now

    def memory(self, field: str) -> int:
        """Return what the kernel says of the worker's memory, in MiB: VmRSS, or VmHWM, the most there ever was."""
        found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) // 1024


@contextmanager
def under_fire(directory: Path, *flags: str) -> Iterator[Target]:
    """A server that has to come out of the block as it went in: alive, the same process, and without a trace logged."""
    quota = directory / "gpuquota.yaml"
    quota.write_text(QUOTA)
    with serving("--standalone", "--quota", quota, *flags) as server, closing(server.connect()) as kept:
        target = Target(server, kept, server.worker())
        target.assert_sound()
        yield target
        target.assert_sound()
        assert server.worker() == target.pid, "the worker was lost, and replaced"
        kept.close()
        assert server.terminate() == 0
        assert "Traceback" not in server.output()
        assert not [line for line in server.logs() if line["level"] == "error"]


def for_a_while(share: float, test: Callable[[], object]) -> int:
    """Repeat a test for a share of the time, once at least; return how often."""
    end, times = time.monotonic() + share * SECONDS, 0
    while times == 0 or time.monotonic() < end:
        test()
        times += 1
    return times


def assert_harmless(reply_body: bytes) -> None:
    """No answer shows how the server is made."""
    assert not [trace for trace in _TRACES if trace in reply_body]


def read_all(connection: socket.socket) -> tuple[bytes, bool]:
    """Return what comes until the server has closed the connection, and whether it has, or rather waits for more."""
    data = b""
    try:
        while more := connection.recv(2**16):
            data += more
    except TimeoutError:
        return data, False
    except ConnectionResetError:
        return data, True
    return data, True


def answers_in(data: bytes) -> list[Answer]:
    """Return the answers that stand one behind another, each checked: of known length, JSON or a plain word."""
    answers = []
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        status = _STATUS.match(head + b"\r\n")
        assert status, data
        assert blank
        length = 0
        if int(status[1]) >= HTTPStatus.OK:
            found = re.search(rb"(?i)\r\nContent-Length: (\d+)", head)
            assert found, head
            length = int(found[1])
        body, data = rest[:length], rest[length:]
        assert len(body) == length
        answers.append(Answer(int(status[1]), head, body))
        assert_harmless(body)
        if b"content-type: application/json" in head.lower():
            assert isinstance(json.loads(body), dict)
        elif length:
            assert b"content-type: text/plain" in head.lower()
    return answers
