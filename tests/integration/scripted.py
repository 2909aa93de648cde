"""A server (of the package kmock) with scripted answers. It makes errors that a healthy API server does not make."""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import kmock


@dataclass(frozen=True)
class Answer:
    """A scripted answer: the HTTP status, the headers, and the payload of which kmock makes the body."""

    payload: kmock.Payload
    status: int = 200
    headers: Mapping[str, str] | None = None

    def render(self) -> kmock.Payload:
        """Return kmock's response. It always has a status, because kmock would otherwise repeat the last status."""
        response: kmock.Payload = kmock.Response(  # type: ignore[attr-defined]  # kmock's __all__ lacks Response
            status=self.status, headers=self.headers, payload=self.payload
        )
        return response


@dataclass
class Script:
    """The scripted answers of the server, in order.

    ``seen``: the requests. ``watches``: the answers to watch requests. After the last of them, a watch stays open and
    silent. ``answers``: the answers to all other requests.
    """

    answers: deque[Answer] = field(default_factory=deque)
    watches: deque[Answer] = field(default_factory=deque)
    seen: list[kmock.Request] = field(default_factory=list)

    def __call__(self, request: kmock.Request) -> kmock.Payload:
        self.seen.append(request)
        if "watch" not in request.params:
            return self.answers.popleft().render()
        return (self.watches.popleft() if self.watches else Answer(SILENT)).render()

    def asked(self) -> list[str]:
        """Return each request as ``LIST``, or as ``WATCH`` with the version at which the watch begins."""
        return [in_short(request) for request in self.seen]


def in_short(request: kmock.Request) -> str:
    return f"WATCH {request.params['resourceVersion']}" if "watch" in request.params else "LIST"


@contextmanager
def serving(script: Script) -> Iterator[str]:
    started: Future[tuple[str, Callable[[], object]]] = Future()

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        async with kmock.RawHandler(strict=False) as handler, kmock.Server(handler) as server:
            handler << script  # kmock's operator << sets the responses
            started.set_result((str(server.url).rstrip("/"), lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()

    with ThreadPoolExecutor(1, "kmock") as pool:
        running = pool.submit(asyncio.run, serve())
        url, end = started.result()
        try:
            yield url
        finally:
            end()
            running.result()


def write_kubeconfig(path: Path, server: str, user: Mapping[str, str], way: Mapping[str, str] | None = None) -> None:
    """Write a kubeconfig with one context. ``way``: more fields of the cluster in it, for example ``proxy-url``."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, **(way or {})}}],
        "users": [{"name": "u", "user": dict(user)}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(document))


def status(code: int, message: str) -> Answer:
    return Answer(status_object(code, message), status=code)


def status_object(code: int, message: str) -> dict[str, object]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


def page(version: int, *items: Mapping[str, object], token: str = "") -> Answer:
    metadata = {"resourceVersion": str(version), "continue": token}
    return Answer({"kind": "List", "metadata": metadata, "items": list(items)})


def stream(*parts: kmock.Payload) -> Answer:
    return Answer(parts)


def item(name: str, version: int, uid: str = "", **fields: object) -> dict[str, object]:
    metadata = {"namespace": "ns", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, **fields}


def event(kind: str, subject: Mapping[str, object]) -> bytes:
    return json.dumps({"type": kind, "object": subject}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return event("BOOKMARK", {"kind": "ConfigMap", "metadata": {"resourceVersion": str(version)}})


def tear(request: kmock.Request) -> None:
    raw = request._raw_request
    assert raw is not None
    assert raw.transport is not None
    raw.transport.close()


def torn(*lines: bytes) -> Answer:
    return stream(*lines, tear)


async def forever() -> None:
    await asyncio.Event().wait()


SILENT: kmock.Payload = (b"\n", forever)
"""The payload of an answer that sends one empty line, and then keeps the connection open."""
