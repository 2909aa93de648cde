"""The ASGI application without a server: how bodies are read, and what becomes of those that do not come."""

import asyncio
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from unittest import mock

import pytest

from webhook import app
from webhook.admission import Service
from webhook.app import LARGE_BODY, MAX_BODY, MAX_LARGE_BODIES, Application, timeout_of

LARGE = b" " * (LARGE_BODY + 1)
JSON = [(b"content-type", b"application/json")]


class Client:
    """One request: its body in parts, and what is sent back. After the last part it is silent, or gone."""

    def __init__(self, *parts: bytes, whole: bool = True, gone: bool = False, length: int | None = None) -> None:
        last = len(parts) - 1
        self._parts = [
            {"type": "http.request", "body": part, "more_body": not (whole and number == last)}
            for number, part in enumerate(parts)
        ]
        if gone:
            self._parts.append({"type": "http.disconnect"})
        said = [] if length is None else [(b"content-length", str(length).encode())]
        self.scope: Any = {"path": "/mutate", "method": "POST", "query_string": b"", "headers": JSON + said}
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
        """The status of the answer."""
        return int(self.sent[0]["status"])


@pytest.fixture
def service() -> mock.Mock:
    """Answers each review by itself."""
    made = mock.Mock(spec=Service, log=mock.Mock())
    made.answer = mock.AsyncMock(side_effect=lambda _path, body, _timeout: body)
    return made


@pytest.fixture(autouse=True)
def hurry() -> Iterator[None]:
    with mock.patch.multiple(app, LARGE_BODY_SECONDS=0.01, LARGE_BODY_WAIT_SECONDS=0.05):
        yield


def serve(service: mock.Mock, *clients: Client) -> None:
    """Serve them all at once."""

    async def run() -> None:
        application = Application(service)
        await asyncio.gather(*(application(each.scope, each.receive, each.send) for each in clients))

    asyncio.run(run())


@pytest.mark.parametrize("parts", [(b"{}",), (b"{", b"", b"}"), (LARGE, b"x", LARGE)], ids=["one", "three", "large"])
def test_a_body_is_put_together_of_its_parts(service: mock.Mock, parts: tuple[bytes, ...]) -> None:
    client = Client(*parts)
    serve(service, client)
    assert (client.status, client.sent[1]["body"]) == (HTTPStatus.OK, b"".join(parts))


def test_a_body_that_says_it_is_too_large_is_refused_unread(service: mock.Mock) -> None:
    client = Client(LARGE, length=MAX_BODY + 1)
    serve(service, client)
    assert (client.status, client.read) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 0)


def test_a_body_that_turns_out_too_large_is_read_no_further(service: mock.Mock) -> None:
    client = Client(*[b" " * 2**20] * 9)
    serve(service, client)
    assert (client.status, client.read) == (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 4)


def test_nobody_is_answered_who_is_gone(service: mock.Mock) -> None:
    client = Client(b"{", whole=False, gone=True)
    serve(service, client)
    assert client.sent == []
    service.answer.assert_not_called()


def test_of_more_large_reviews_than_there_is_room_for_the_rest_is_told_to_come_again(service: mock.Mock) -> None:
    """Elsewhere, best: so the connection ends. Small ones are answered meanwhile."""
    done = asyncio.Event()

    async def answer(_path: str, body: bytes, _timeout: float) -> bytes:
        if len(body) > LARGE_BODY:
            await done.wait()
        return body

    async def finish(message: Any) -> None:
        late.sent.append(message)
        done.set()

    service.answer = answer
    early, late, small = [Client(LARGE, b"x") for _ in range(MAX_LARGE_BODIES)], Client(LARGE, b"x"), Client(b"{}")
    late.send = finish  # type: ignore[method-assign]
    serve(service, *early, late, small)
    assert {client.status for client in (*early, small)} == {HTTPStatus.OK}
    crowded = {"error": "too many large reviews are being read at once", "status": 503}
    assert (late.status, json.loads(late.sent[1]["body"])) == (503, crowded)
    assert {(b"retry-after", b"1"), (b"connection", b"close")} < set(late.sent[0]["headers"])


def test_who_sends_a_large_body_slowly_makes_room_for_others(service: mock.Mock) -> None:
    slow = [Client(LARGE, whole=False) for _ in range(MAX_LARGE_BODIES)]
    good = Client(LARGE, b"x")
    serve(service, *slow, good)
    assert {client.status for client in slow} == {HTTPStatus.REQUEST_TIMEOUT}
    assert good.status == HTTPStatus.OK


def test_the_timeout_is_the_api_servers() -> None:
    assert [timeout_of(query) for query in (b"timeout=3s", b"timeout=1m30s", b"timeout=500ms", b"")] == [3, 90, 0.5, 10]
