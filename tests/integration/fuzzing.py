"""Helpers for fuzz tests, which send arbitrary input to a webhook.

The webhook must always answer in JSON, never show a stack trace, and still answer valid requests.
"""

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
from tests.processes import PATIENCE, WebhookProcess, exchange, memory, serving

SECONDS = float(os.environ.get("FUZZ_SECONDS", "12"))
"""Seconds that all fuzz tests together may take. `make fuzz` sets ten minutes."""

QUOTA = "{steady: {quota: {M40: 8}}, full: {quota: {M40: 0, P100: 0, A100: 0}}, roomy: {quota: {M40: 100000}}}"

GOOD = json.dumps(review_of(card_pod("good", "steady")))
TOO_MUCH = json.dumps(review_of(with_uid(pinned(card_pod("too-much", "steady", cards=9)))))

_STATUS = re.compile(rb"HTTP/1\.\d (\d{3}) [^\r\n]+\r\n")
_TRACES = (b"Traceback", b'File "', b"<html")


class Answer(NamedTuple):
    """A parsed HTTP answer of valid form."""

    status: int
    head: bytes
    body: bytes


@dataclass
class Target:
    """The webhook under test, and a client's connection that stays open, as the API server's connections do."""

    server: WebhookProcess
    kept: HTTPSConnection
    pid: int

    def assert_sound(self) -> None:
        """Assert that valid requests get correct answers, on the open connection ``kept`` and on a new one."""
        for connection in (self.kept, self.server.connect()):
            response = exchange(connection, "POST", "/mutate", GOOD).decoded()["response"]
            assert response["allowed"], response
            assert response["patchType"] == "JSONPatch"
            verdict = exchange(connection, "POST", "/validate", TOO_MUCH).decoded()["response"]
            assert verdict["status"]["code"] == HTTPStatus.FORBIDDEN
            if connection is not self.kept:
                connection.close()

    def assert_kept(self, used: socket.socket | None) -> None:
        """Assert that the server has not closed the connection. http.client would silently open a new socket."""
        assert used is not None
        assert self.kept.sock is used

    def open(self, receive_buffer: int | None = None) -> socket.socket:
        parts = urllib.parse.urlsplit(self.server.url)
        raw = socket.socket()
        raw.settimeout(PATIENCE)
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.connect((parts.hostname, parts.port))
        return raw

    def shake_hands(self, receive_buffer: int | None = None) -> ssl.SSLSocket:
        return self.server.tls.wrap_socket(self.open(receive_buffer), server_hostname="127.0.0.1")

    def note_memory(self, when: str) -> int:
        now = self.memory("VmRSS")
        print(f"resident memory {when}: {now} MiB")
        return now

    def memory(self, field: str) -> int:
        """Return the resident memory of the worker process in MiB: the current (VmRSS) or the highest (VmHWM)."""
        return memory(self.pid, field)


@contextmanager
def under_fire(directory: Path, *flags: str) -> Iterator[Target]:
    """Run a webhook. At the end, it must still have its first worker process, and no stack trace in its log."""
    quota = directory / "gpuquota.yaml"
    quota.write_text(QUOTA)
    with serving("--standalone", "--quota", quota, *flags) as server, closing(server.connect()) as kept:
        target = Target(server, kept, server.worker())
        target.assert_sound()
        yield target
        target.assert_sound()
        assert server.worker() == target.pid, "the worker process has ended and was replaced"
        kept.close()
        assert server.terminate() == 0
        assert "Traceback" not in server.output()
        assert not [line for line in server.logs() if line["level"] == "error"]


def for_a_while(share: float, test: Callable[[], object]) -> int:
    """Run ``test`` repeatedly for this share of `SECONDS`, at least once. Return how often it was run."""
    end, times = time.monotonic() + share * SECONDS, 0
    while times == 0 or time.monotonic() < end:
        test()
        times += 1
    return times


def assert_harmless(reply_body: bytes) -> None:
    assert not [trace for trace in _TRACES if trace in reply_body]


def read_all(connection: socket.socket) -> tuple[bytes, bool]:
    """Return the received bytes, and whether the server has closed the connection. If not, it waits for more input."""
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
    """Return the consecutive HTTP answers in the text. Each must have a length, and a body of JSON or plain text."""
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
