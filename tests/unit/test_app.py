"""Tests of the webhook's ASGI application without a server: complete request bodies, and bodies that never arrive."""

import asyncio
import json
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from unittest import mock

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.reviews import review_of
from tests.tables import cases
from webhook.admission import Gate, Service
from webhook.intake.bodies import LARGE_BODY, MAX_BODY, ReviewHead
from webhook.intake.large_reviews import PLACES
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import Metrics
from webhook.server import app
from webhook.server.app import ARRIVED, Application, timeout_of

LARGE = b" " * (LARGE_BODY + 1)
JSON = [(b"content-type", b"application/json")]


class Client:
    """A client that sends one request body in parts. Then it sends nothing more, or disconnects."""

    def __init__(
        self, *parts: bytes, whole: bool = True, gone: bool = False, length: int | None = None, timeout: str = "10s"
    ) -> None:
        last = len(parts) - 1
        self._parts = [
            {"type": "http.request", "body": part, "more_body": not (whole and number == last)}
            for number, part in enumerate(parts)
        ]
        if gone:
            self._parts.append({"type": "http.disconnect"})
        said = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope: Any = {"path": "/mutate", "method": "POST", "headers": JSON + said}
        self.scope["query_string"] = f"timeout={timeout}".encode()
        self.sent: list[Any] = []
        self.read = 0

    async def receive(self) -> Any:
        if self.read == len(self._parts):
            await asyncio.Event().wait()
        self.read += 1
        return self._parts[self.read - 1]

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


@pytest.fixture
def service() -> mock.Mock:
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[])
    real = Service(lambda: None, MemoryLedgers(), Metrics(), Gate(), log)
    made = mock.Mock(wraps=real, log=log, metrics=real.metrics)
    made.answer = mock.AsyncMock(side_effect=lambda _path, body, *_: body)
    return made


@pytest.fixture(autouse=True)
def hurry() -> Iterator[None]:
    with mock.patch.multiple(app, LARGE_BODY_SECONDS=0.01):
        yield


def dropped(service: mock.Mock) -> dict[str, float]:
    families = text_string_to_metric_families(service.metrics.render().decode())
    samples = [each for family in families for each in family.samples]
    return {each.labels["reason"]: each.value for each in samples if each.name == "vcuda_reviews_dropped_total"}


def serve(service: mock.Mock, *clients: Client) -> None:
    async def run() -> None:
        application = Application(service)
        await asyncio.gather(*(application(each.scope, each.receive, each.send) for each in clients))

    asyncio.run(run())


@cases("parts", one=(b"{}",), three=(b"{", b"", b"}"), large=(LARGE, b"x", LARGE))
def test_a_body_is_assembled_from_its_parts(service: mock.Mock, parts: tuple[bytes, ...]) -> None:
    client = Client(*parts)
    serve(service, client)
    assert (client.status, client.sent[1]["body"]) == (HTTPStatus.OK, b"".join(parts))


KIND = b'{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1",'
HEAD = KIND + b'"request":{"uid":"f-1","namespace":"team-a","object":"'


@cases(
    "parts, length, read",
    by_its_Content_Length=((HEAD + LARGE, LARGE), MAX_BODY + 1, 1),
    by_the_received_bytes=((HEAD, *[b" " * 2**20] * 9), None, 4),
)
def test_a_review_over_the_size_bound_is_rejected_and_not_read_to_its_end(
    service: mock.Mock, parts: tuple[bytes, ...], length: int | None, read: int
) -> None:
    client = Client(*parts, length=length)
    serve(service, client)
    assert (client.status, client.read) == (HTTPStatus.OK, read)
    response = json.loads(client.sent[1]["body"])["response"]
    assert (response["uid"], response["allowed"]) == ("f-1", False)
    assert (response["status"]["code"], response["status"]["reason"]) == (413, "RequestEntityTooLarge")
    told = f"more than {MAX_BODY} bytes (3 MiB). In a review, each &, < and > takes six bytes"
    assert told in response["status"]["message"]
    service.answer.assert_not_called()


def test_a_body_over_the_bound_that_names_no_review_is_an_http_error(service: mock.Mock) -> None:
    client = Client(*[b" " * 2**20] * 9)
    serve(service, client)
    assert (client.status, client.read) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 4)


def test_a_large_review_without_a_namespace_is_a_client_error_and_gets_no_place(service: mock.Mock) -> None:
    client = Client(KIND + b'"request":{"uid":"f-1","name":"' + b"x" * LARGE_BODY)
    serve(service, client)
    assert client.status == HTTPStatus.BAD_REQUEST
    service.answer.assert_not_called()


def test_a_client_that_disconnected_gets_no_answer(service: mock.Mock) -> None:
    client = Client(b"{", whole=False, gone=True)
    serve(service, client)
    assert client.sent == []
    service.answer.assert_not_called()
    assert dropped(service) == {"disconnected": 1}


def of(namespace: str) -> bytes:
    return HEAD.replace(b"team-a", namespace.encode()) + LARGE


def test_one_namespace_cannot_take_all_places_for_large_reviews(service: mock.Mock) -> None:
    """The answer with status 503 closes the connection, so that the API server's retry may reach another replica."""
    done = asyncio.Event()

    async def answer(_path: str, body: bytes, *_: object) -> bytes:
        if b'"team-a"' in body:
            await done.wait()
        return body

    async def finish(message: Any) -> None:
        last.sent.append(message)
        done.set()

    service.answer = answer
    crowd = [Client(of("team-a"), b"x", timeout="1s", length=len(LARGE)) for _ in range(PLACES.key_turns + 1)]
    other, small, last = Client(of("team-b"), b"x"), Client(b"{}"), crowd[-1]
    last.send = finish  # type: ignore[method-assign]
    serve(service, *crowd, other, small)
    assert {client.status for client in (*crowd[:-1], other, small)} == {HTTPStatus.OK}
    told = "this replica had too many large reviews, so it could not decide this review in time"
    late = {"error": told, "status": 503}
    assert (last.status, json.loads(last.sent[1]["body"])) == (503, late)
    assert {(b"retry-after", b"1"), (b"connection", b"close")} < set(last.sent[0]["headers"])
    assert dropped(service) == {"late": 1}


def test_a_large_body_that_arrives_too_slowly_is_dropped_and_others_are_served(service: mock.Mock) -> None:
    slow = [Client(of(f"team-{number % 4}"), whole=False) for number in range(PLACES.turns)]
    good = Client(of("team-0"), b"x")
    serve(service, *slow, good)
    assert {client.status for client in slow} == {HTTPStatus.REQUEST_TIMEOUT}
    assert good.status == HTTPStatus.OK
    assert dropped(service) == {"slow": PLACES.turns}


@pytest.mark.parametrize(("size", "path"), [(2, "/validate"), (2, "/quota"), (2 * LARGE_BODY, "/validate")])
def test_a_review_that_was_received_too_long_ago_is_not_decided(size: int, path: str) -> None:
    """The API server no longer waits for an answer to this review. This may happen if the replica was suspended."""
    policy = mock.Mock()
    webhook = mock.Mock(wraps=Service(policy, MemoryLedgers(), Metrics(), Gate(), mock.Mock()), log=mock.Mock())
    client = Client(b" " * size)
    client.scope |= {"path": path, "extensions": {ARRIVED: time.monotonic() - 60}}
    serve(webhook, client)
    assert client.status == HTTPStatus.SERVICE_UNAVAILABLE
    policy.assert_not_called()


def test_the_timeout_is_at_most_that_of_the_api_server() -> None:
    told = [timeout_of(query) for query in (b"timeout=3s", b"timeout=1m30s", b"timeout=500ms", b"")]
    assert told == [3, 30, 0.5, 10]


@cases(
    "body, head",
    plain=(HEAD + b'"}}', ("f-1", "team-a")),
    a_name_that_looks_like_a_field=(
        json.dumps(review_of({}, uid="u", namespace="n", name='","namespace":"other')).encode(),
        ("u", "n"),
    ),
    none=(b'{"request":{"uid":"u","kind":{}}}', ("u", "")),
    too_long=(b'{"request":{"uid":"%s","namespace":"%s"}}' % (b"u" * 65, b"n" * 64), ("", "")),
    fields_in_another_order=(b'{"request":{"namespace":"Team/A","uid":"u"}}', ("", "")),
    a_long_name=(b'{"request":{"uid":"u","name":"%s","namespace":"n"' % (b"x" * 60_000), ("u", "n")),
    namespace_too_far_behind=(b'{"request":{"uid":"u"},' + LARGE + b'"namespace":"n"', ("u", "")),
    empty=(b"", ("", "")),
)
def test_the_first_bytes_show_the_namespace_of_a_review(body: bytes, head: tuple[str, str]) -> None:
    assert ReviewHead.read(body) == head
