"""The HTTP side: one ASGI application answers the reviews; Flask, beside it, answers every other page.

Whatever goes wrong is answered by a short JSON object, ``{"error": …, "status": …}``. The caller never sees a trace;
the log does.
"""

import asyncio
import functools
from collections.abc import Coroutine
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import parse_qs

import flask
import msgspec
from a2wsgi import WSGIMiddleware
from kubernetes.utils.duration import parse_duration
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from vcuda.errors import BadReview, Unavailable, VcudaError
from webhook import admission, metrics

if TYPE_CHECKING:
    from a2wsgi.asgi_typing import HTTPScope, Receive, Send
    from a2wsgi.wsgi_typing import WSGIApp

REVIEWS = frozenset({"/mutate", "/validate", "/quota"})
DEFAULT_TIMEOUT_SECONDS = 10.0
"""The API server's own default for a webhook without timeoutSeconds."""

MAX_BODY = 3 * 2**20
"""Bytes. The API server takes objects up to 3 MiB, so nothing larger comes from it."""

# Bytes; the review of a usual pod has 4 to 20 KiB.
LARGE_BODY = 2**16

# Bodies over that in memory at once: some 24 MiB, and as much again while they are decoded. The others stay unread, in
# the kernel and at their sender, and are told to come again before the API server itself gives the call up. Who sends
# one slowly has less time than for a small one, since others wait for its place.
MAX_LARGE_BODIES = 8
LARGE_BODY_WAIT_SECONDS = 6.0
LARGE_BODY_SECONDS = 3.0

# A probe and a scrape at once are all there ever is.
PAGE_THREADS = 4

JSON = b"application/json"
COME_AGAIN = ((b"retry-after", b"1"), (b"connection", b"close"))


class Reply(NamedTuple):
    """An answer before it is sent; what is not a verdict has a ``status`` of its own."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[bytes, bytes], ...] = ()


def error_object(message: str, status: int) -> bytes:
    """Return the JSON object that every error is told by."""
    return msgspec.json.encode({"error": message, "status": int(status)})


class Application:
    """The webhook's ASGI application over one service."""

    def __init__(self, service: admission.Service) -> None:
        self._service = service
        self._pages = WSGIMiddleware(cast("WSGIApp", make_pages(service)), workers=PAGE_THREADS)
        self._large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)

    async def __call__(self, scope: "HTTPScope", receive: "Receive", send: "Send") -> None:
        """Serve one request."""
        if scope["path"] not in REVIEWS:
            await self._pages(scope, receive, send)
            return
        try:
            reply = await self._reply(scope, receive)
        except ConnectionAbortedError:
            return
        length = str(len(reply.body)).encode()
        headers = [(b"content-type", JSON), (b"content-length", length), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body, "more_body": False})

    async def _reply(self, scope: "HTTPScope", receive: "Receive") -> Reply:
        try:
            if scope["method"] != "POST":
                return _fault(MethodNotAllowed.description, HTTPStatus.METHOD_NOT_ALLOWED, (b"allow", b"POST"))
            return Reply(await self._answer(scope, receive))
        except ConnectionAbortedError:
            raise
        except BadReview as error:
            return _fault(str(error), error.status)
        except Unavailable as error:
            self._service.log.warning("not answered", path=scope["path"], reason=str(error))
            # The API server repeats the call, and on another connection: so it reaches another replica.
            return _fault(str(error), HTTPStatus.SERVICE_UNAVAILABLE, *COME_AGAIN)
        except VcudaError as error:
            self._service.log.error("not answered", path=scope["path"], reason=str(error))  # noqa: TRY400  # says enough
            return _fault(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets a sentence and the log the trace
            return _fault(_internal(self._service, scope["path"], error), HTTPStatus.INTERNAL_SERVER_ERROR)

    async def _answer(self, scope: "HTTPScope", receive: "Receive") -> bytes:
        headers = dict(scope["headers"])
        if int(headers.get(b"content-length", 0)) > MAX_BODY:
            raise _too_large()
        # The body is read before anything is refused: the next request on this connection stands behind it.
        body = Body(receive)
        await body.read(LARGE_BODY)
        if body.whole:
            return await self._decide(scope, headers, body.content())
        crowded = Unavailable("too many large reviews are being read at once")
        await _within(LARGE_BODY_WAIT_SECONDS, self._large_bodies.acquire(), crowded)
        try:
            late = BadReview("the body has not come in time", HTTPStatus.REQUEST_TIMEOUT)
            await _within(LARGE_BODY_SECONDS, body.read(), late)
            return await self._decide(scope, headers, body.content())
        finally:
            self._large_bodies.release()

    async def _decide(self, scope: "HTTPScope", headers: dict[bytes, bytes], body: bytes) -> bytes:
        if headers.get(b"content-type", b"").partition(b";")[0] != JSON:
            raise BadReview(f"the body must be {JSON.decode()}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        timeout = timeout_of(scope["query_string"])
        return await self._service.answer(scope["path"], body, timeout)


class Body:
    """A request's body as it comes; ``whole`` tells whether all of it is here."""

    def __init__(self, receive: "Receive") -> None:
        self.whole = False
        self._receive = receive
        self._chunks: list[bytes] = []
        self._size = 0

    async def read(self, enough: int = MAX_BODY) -> None:
        """Take what comes until the body is whole, or more than ``enough`` bytes of it are here.

        Raises:
            BadReview: it is over `MAX_BODY`.
            ConnectionAbortedError: the client is gone, so there is nobody to answer.

        """
        while not self.whole and self._size <= enough:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ConnectionAbortedError
            self._chunks.append(message.get("body", b""))
            self._size += len(self._chunks[-1])
            self.whole = not message.get("more_body", False)
            if self._size > MAX_BODY:
                raise _too_large()

    def content(self) -> bytes:
        """Return what is here, once: it is not kept."""
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


@functools.lru_cache(maxsize=64)
def timeout_of(query: bytes) -> float:
    """Return the API server's ``?timeout=10s`` in seconds. There are few different ones, so each is read once.

    Raises:
        BadReview: it is no duration.

    """
    duration = parse_qs(query.decode("latin-1")).get("timeout", [""])[0]
    if not duration:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds: float = parse_duration(duration).total_seconds()
    except ValueError as error:
        raise BadReview(f"timeout={duration!r} is no duration: {error}") from error
    return seconds


async def _within(seconds: float, work: Coroutine[object, object, object], late: VcudaError) -> None:
    try:
        await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise late from None


def _too_large() -> BadReview:
    return BadReview(f"the body is over {MAX_BODY} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


def _fault(message: str, status: HTTPStatus, *headers: tuple[bytes, bytes]) -> Reply:
    return Reply(error_object(message, status), status, headers)


def _internal(service: admission.Service, path: str, error: Exception) -> str:
    service.log.error("internal error", path=path, exc_info=error)
    return "internal error; the webhook's log has the details"


def make_pages(service: admission.Service) -> flask.Flask:
    """Return the Flask application that serves what is not a review: the health checks and the metrics."""
    app = flask.Flask("webhook", static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False

    def readiness() -> flask.Response:
        if service.ready:
            return _text("ok")
        reason = "stopping" if service.gate.leaving else "the quota has not been read yet"
        return _text(reason, HTTPStatus.SERVICE_UNAVAILABLE)

    def http_error(error: HTTPException) -> flask.Response:
        reply = _json(error.description or error.name, HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR))
        if isinstance(error, MethodNotAllowed):
            reply.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        return reply

    def unexpected(error: Exception) -> flask.Response:
        return _json(_internal(service, flask.request.path, error), HTTPStatus.INTERNAL_SERVER_ERROR)

    app.add_url_rule("/healthz", "healthz", lambda: _text("ok"))
    app.add_url_rule("/readyz", "readyz", readiness)
    app.add_url_rule(
        "/metrics", "metrics", lambda: flask.Response(service.metrics.render(), content_type=metrics.CONTENT_TYPE)
    )
    app.register_error_handler(HTTPException, http_error)
    app.register_error_handler(Exception, unexpected)
    return app


def _json(message: str, status: HTTPStatus) -> flask.Response:
    return flask.Response(error_object(message, status), status=status.value, content_type=JSON.decode())


def _text(body: str, status: HTTPStatus = HTTPStatus.OK) -> flask.Response:
    return flask.Response(f"{body}\n", status=status.value, content_type="text/plain; charset=utf-8")
