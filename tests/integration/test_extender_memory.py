"""Tests of the memory of the scheduler extender, a separate process, when it receives several largest bodies."""

import itertools
import ssl
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from threading import Event

import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.extender.metrics import ExtenderMetrics
from controller.extender.service import MAX_BODY, Listening, create_application, serve_extender, verbs_of
from tests.api_double import ApiDouble
from tests.e2e.installation import CLIENT, CLIENT_NAME, make_certificates
from tests.extended import Leader
from tests.processes import PATIENCE, OwnProcess, memory
from vcuda.logs import configure
from vcuda.tls import ServingCertificate

SENDERS = 8
CAUTIOUS, LARGEST = 128, 640
"""Two maxima of the extender's memory in MiB: if it rejects the largest bodies, and if it reads them.

An idle process takes 72 MiB. The extender keeps one of the largest bodies at a time, and an answer that may be as
large.
"""

HEAD, END = b'{"Pod":{},"Nodes":{"items":[', b"{}]}}"
NODE = b'{"metadata":{"annotations":{"about":"' + b"n" * 2**16 + b'"},"name":"node-%08d"}},'
PRIORITIZE = ("POST", "/scheduler/prioritize")
FEW, SLOW = {0, 413}, {0, 200, 408, 500}
"""Permitted statuses of rejected and of read bodies. 0: the connection ended, as clients may be too slow."""


class Extender(OwnProcess):
    """A running extender without pods. It answers only clients with the scheduler's certificate."""

    def await_start(self) -> None:
        self.port: int = self.await_log("listening")["port"]


@pytest.fixture
def extender(tmp_path: Path) -> Iterator[Extender]:
    make_certificates(tmp_path)
    with Extender((sys.executable, "-m", __name__, tmp_path), {}) as running:
        yield running
        running.kill()  # killed, because this process does not handle SIGTERM


def largest(end: bytes) -> Iterator[bytes]:
    """Yield parts of the largest permitted body with whole nodes, as from the scheduler. ``end`` closes the JSON."""
    count, rest = divmod(MAX_BODY - len(HEAD) - len(END), len(NODE % 0))
    yield from itertools.chain([HEAD], (NODE % number for number in range(count)), [b" " * rest, end])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "request_line", "end", "chunked", "answers", "most"),
    [
        ("", PRIORITIZE, b"", False, FEW, CAUTIOUS),
        ("", PRIORITIZE, END, False, FEW, CAUTIOUS),
        (CLIENT, PRIORITIZE, b"", False, SLOW, LARGEST),
        (CLIENT, PRIORITIZE, END, False, SLOW, LARGEST),
        (CLIENT, ("POST", "/scheduler/predicates"), END, False, SLOW, LARGEST),
        (CLIENT, PRIORITIZE, END, True, FEW, CAUTIOUS),
        (CLIENT, ("POST", "/unknown"), b"", False, FEW, CAUTIOUS),
        (CLIENT, ("GET", "/unknown"), END, True, FEW, CAUTIOUS),
        (CLIENT, ("GET", "/version"), b"", False, FEW, CAUTIOUS),
    ],
)
def test_only_one_of_the_largest_bodies_is_held_at_once_and_only_from_the_scheduler(  # noqa: PLR0917  # one argument per column
    extender: Extender,
    tmp_path: Path,
    shown: str,
    request_line: tuple[str, str],
    end: bytes,
    chunked: bool,
    answers: set[int],
    most: int,
) -> None:
    """Before the extender had this limit, eight incomplete or chunked bodies took 1,278 MiB."""
    context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    if shown:
        context.load_cert_chain(tmp_path / shown / "tls.crt", tmp_path / shown / "tls.key")
    length = {} if chunked else {"Content-Length": str(MAX_BODY)}

    def send(_: int) -> int:
        with (
            closing(HTTPSConnection("127.0.0.1", extender.port, timeout=PATIENCE, context=context)) as connection,
            suppress(OSError, HTTPException),
        ):
            connection.request(*request_line, largest(end), length, encode_chunked=chunked)
            answer = connection.getresponse()
            answer.read()
            return answer.status
        return 0

    with ThreadPoolExecutor(SENDERS) as pool:
        assert set(pool.map(send, range(SENDERS))) <= answers
    highest = memory(extender.process.pid)
    print(f"at most {highest} MiB")
    assert highest < most


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    certificate = ServingCertificate(directory, client_ca=directory / "ca.crt", client_required=True)
    application = create_application(verbs_of(Leader(ApiDouble()).allocator), ExtenderMetrics(CollectorRegistry()))
    server = serve_extender(Listening(("127.0.0.1", 0), certificate, client_name=CLIENT_NAME), application)
    configure("info")
    structlog.get_logger().info("listening", port=server.port)
    Event().wait()
