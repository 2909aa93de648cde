"""Requests to the API server. Bodies are bytes, and every failure is an exception of `vcuda.errors`."""

import contextlib
import datetime
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
import urllib3
from kubernetes.client import ApiClient, Configuration
from urllib3.exceptions import HTTPError, ReadTimeoutError, TimeoutError as UrllibTimeoutError

from vcuda import __version__, errors
from vcuda.kube.authorization import AuthorizerGrace
from vcuda.kube.connection import ApiRequest, Params, Sender, VersionCheck, loader
from vcuda.kube.pages import MOST_OBJECT_BYTES, Page, Pager, Skip, name_in

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"

# The cause in a 429 for a PodDisruptionBudget (policyv1.DisruptionBudgetCause).
DISRUPTION_BUDGET = "DisruptionBudget"

_BY_STATUS = {403: errors.Forbidden, 404: errors.NotFound, 409: errors.Conflict, 410: errors.Gone}


class Details(msgspec.Struct, frozen=True):
    """The details of a Status."""

    causes: tuple[errors.Cause, ...] | None = None


class Status(msgspec.Struct, frozen=True):
    """A Kubernetes Status: the body of every error answer, and the object of an ERROR watch event."""

    message: str = ""
    code: int = 0
    details: Details | None = None

    @property
    def causes(self) -> tuple[errors.Cause, ...]:
        return (self.details and self.details.causes) or ()


class Heard(NamedTuple):
    """An answer: its body, the warnings of the API server and its webhooks, and the time of the API server."""

    body: bytes
    warnings: tuple[str, ...] = ()
    date: datetime.datetime | None = None


_STATUS = msgspec.json.Decoder(Status)

LIST_SECONDS = 60.0
"""Seconds for a whole LIST, unless the caller gives others."""


@dataclass(frozen=True, slots=True)
class Kube:
    """A client of one API server for all threads. `Kube.connect` makes it.

    Paths start with ``/api`` or ``/apis``. Timeouts are seconds for the whole call. For a refused request every method
    raises NotFound, Conflict, Gone or another ApiError, with the API server's own sentence. For 429, 5xx, a connection
    that fails or breaks, and a timeout it raises Unavailable. With ``grace`` it also raises Unavailable for a 403 of an
    API server that may have just started.
    """

    sender: Sender
    version_check: VersionCheck | None = None
    grace: AuthorizerGrace | None = None

    @classmethod
    def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        *,
        pool_size: int = 8,
        version_check: VersionCheck | None = None,
        grace: AuthorizerGrace | None = None,
    ) -> "Kube":
        """Return a client by the given kubeconfig. No request is sent yet.

        Without ``kubeconfig`` the credentials are those of the service account if KUBERNETES_SERVICE_HOST is set, and
        otherwise those of KUBECONFIG or ~/.kube/config. ``pool_size``: the number of kept connections.
        ``version_check`` reads and checks the API server's version before the first request. ``grace``: for processes
        whose callers retry after Unavailable.

        Raises BadInput if the credentials cannot be read.
        """
        configuration = Configuration(retries=False, connection_pool_maxsize=pool_size)
        configuration.keep_alive = True
        load = loader(kubeconfig, context)
        load(configuration)
        api = ApiClient(configuration)
        api.user_agent = f"vcuda-quota/{__version__}"
        return cls(Sender(api, load), version_check, grace)

    def close(self) -> None:
        """Close the connections that no call uses."""
        self.sender.close()

    def get(self, path: str, params: Params | None = None, timeout: float = 10, most: int = MOST_OBJECT_BYTES) -> bytes:
        """Read one object. The read is consistent (from etcd), unless ``params`` say otherwise.

        Raises TooLarge for an answer of more than ``most`` bytes.
        """
        return self._heard(ApiRequest("GET", path, params), timeout, most).body

    def get_heard(self, path: str, params: Params | None = None, timeout: float = 10) -> Heard:
        """Read an object like `get`, and return it with the time of the API server."""
        return self._heard(ApiRequest("GET", path, params), timeout)

    def post(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        """Create the object in ``body`` (JSON). Raises Conflict if the name is taken."""
        return self.post_heard(path, body, params, timeout).body

    def post_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        """Create an object like `post`, and return it with the warnings."""
        return self._heard(ApiRequest("POST", path, params, body), timeout)

    def put(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        """Replace an object. Raises Conflict if the resourceVersion in ``body`` is not the newest."""
        return self.put_heard(path, body, params, timeout).body

    def put_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        """Replace an object like `put`, and return it with the time of the API server."""
        return self._heard(ApiRequest("PUT", path, params, body), timeout)

    def patch(
        self, path: str, body: bytes, content_type: str, params: Params | None = None, *, timeout: float = 10
    ) -> bytes:
        """Patch an object. ``content_type``: MERGE_PATCH, JSON_PATCH or another that the API server accepts."""
        return self._heard(ApiRequest("PATCH", path, params, body, content_type), timeout).body

    def delete(self, path: str, body: bytes | None = None, params: Params | None = None, timeout: float = 10) -> bytes:
        """Delete an object. ``body``: DeleteOptions in JSON, for preconditions."""
        return self._heard(ApiRequest("DELETE", path, params, body), timeout).body

    def list_pages(
        self,
        path: str,
        params: Params | None = None,
        limit: int = 500,
        timeout: float = 30,
        *,
        seconds: float = LIST_SECONDS,
        skip: Skip | None = None,
    ) -> Iterator[Page]:
        """Yield the pages of one consistent LIST, of at most ``limit`` objects and some MiB each.

        ``timeout`` is for one page. ``seconds`` is for the whole LIST, with the caller's work between pages. ``skip``
        is called for an object of more than `MOST_OBJECT_BYTES`, which is then left out.

        Raises TooLarge for such an object without ``skip``. Raises ListOverdue after ``seconds``. Raises Gone if the
        LIST took longer than etcd keeps its version (5 minutes by default); the caller must begin again.
        """

        # Each page may have another limit, because the continue token has only the version and the key (EncodeContinue
        # in k8s.io/apiserver, pkg/storage/continue.go).
        def fetch(objects: int, token: str, timeout: float, most: int) -> bytes:
            query = {**(params or {}), "limit": objects, **({"continue": token} if token else {})}
            return self.get(path, query, timeout, most)

        yield from Pager(fetch, f"LIST {path}", most=limit, timeout=timeout, seconds=seconds, skip=skip)

    def stream(
        self, path: str, params: Params | None = None, *, connect_timeout: float = 10, read_timeout: float
    ) -> "Stream":
        """Open a GET whose answer is an endless stream of lines. It ends after ``read_timeout`` seconds without one."""
        self._check_version(connect_timeout)
        request = ApiRequest("GET", path, params)
        with transport(str(request)):
            response = self.sender.send(request, urllib3.Timeout(connect=connect_timeout, read=read_timeout))
            if response.status == HTTPStatus.OK:
                return Stream(response, str(request))
            body = read_body(response, time.monotonic() + connect_timeout, MOST_OBJECT_BYTES)
        raise self._refusal(str(request), response.status, body)

    def _check_version(self, timeout: float) -> None:
        check = self.version_check
        if check is not None and not check.passed:
            host = urlsplit(self.sender.host)
            server = f"{host.scheme}://{host.netloc.rpartition('@')[2]}"  # the part before the @ may have a password
            check.make(lambda: self._answer(ApiRequest("GET", "/version"), timeout).body, server)

    def _heard(self, request: ApiRequest, timeout: float, most: int = MOST_OBJECT_BYTES) -> Heard:
        self._check_version(timeout)
        return self._answer(request, timeout, most)

    def _answer(self, request: ApiRequest, timeout: float, most: int = MOST_OBJECT_BYTES) -> Heard:
        deadline = time.monotonic() + timeout
        with transport(str(request)):
            response = self.sender.send(request, urllib3.Timeout(total=timeout))
            answer = read_body(response, deadline, most)
        if HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            headers = response.headers
            return Heard(answer, warnings_in(headers.getlist("Warning")), _date(headers.get("Date")))
        raise self._refusal(str(request), response.status, answer)

    def _refusal(self, what: str, status: int, body: bytes) -> errors.VcudaError:
        error = refusal(what, status, body)
        if self.grace and isinstance(error, errors.Forbidden) and self.grace.covers(error.message):
            return errors.Unavailable(f"{what}: {error}; this passes if the API server has just started")
        return error


def upsert(kube: Kube, collection: str, manifest: Mapping[str, Any]) -> bytes:
    """Set these fields of an object, or create the object with them. Return the stored object.

    Other fields stay. Raises Conflict if another client creates the object at the same time.
    """
    body = msgspec.json.encode(manifest)
    try:
        return kube.patch(f"{collection}/{segment(manifest['metadata']['name'])}", body, MERGE_PATCH)
    except errors.NotFound:
        # Only a server-side apply would create the object, and it would take the fields from other managers.
        return kube.post(collection, body)


def refusal(what: str, status: int, body: bytes) -> errors.VcudaError:
    """Return the error for an answer other than 2xx, with the sentence of the Status in its body, if there is one."""
    try:
        told = _STATUS.decode(body)
    except msgspec.MsgspecError:
        told = Status(body[:200].decode(errors="replace").strip())
    message = told.message or "no reason given"
    budget = next((cause for cause in told.causes if cause.reason == DISRUPTION_BUDGET), None)
    if status == HTTPStatus.TOO_MANY_REQUESTS and budget:
        return errors.HeldByBudget(f"{what}: {message} (HTTP {status})", budget.message or message)
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return errors.Unavailable(f"{what}: {message} (HTTP {status})")
    return _BY_STATUS.get(status, errors.ApiError)(status, message, told.causes, what)


def segment(name: str) -> str:
    """Return a name as one segment of a path."""
    # Users choose some names, in Events, flags and manifests. A slash in a name must not lead to another object.
    return quote(name, safe="")


_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def warnings_in(headers: Iterable[str]) -> tuple[str, ...]:
    """Return the texts in the values of ``Warning`` headers. Values that are no warnings by the RFC are left out."""
    return tuple(_text(quoted) for header in headers for quoted in _WARNING.findall(header))


def _text(quoted: str) -> str:
    # Return a quoted-string's text. http.client decodes headers as Latin-1, whatever they are.
    return _ESCAPED.sub(r"\1", quoted).encode("latin-1").decode("utf-8", "replace")


def _date(header: str | None) -> datetime.datetime | None:
    try:
        return parsedate_to_datetime(header) if header else None
    except ValueError:
        return None


_CHUNK = 64 * 1024  # bytes of one read of the socket, so that a line is delivered as soon as it arrives
_HEAD_PARTS = 16  # characters of an answer that is too large, for the message


@contextlib.contextmanager
def transport(what: str) -> Iterator[None]:
    """Raise Unavailable for every failure of a connection. ``what``: the request, for the message."""
    try:
        yield
    except (UrllibTimeoutError, TimeoutError) as error:
        raise errors.TimedOut(f"{what}: {type(error).__name__}: {error}") from error
    except (HTTPError, OSError) as error:
        raise errors.Unavailable(f"{what}: {type(error).__name__}: {error}") from error
    except errors.TooLarge as error:
        raise errors.TooLarge(f"{what}: {error}", error.head) from error


def read_body(response: urllib3.BaseHTTPResponse, deadline: float, most: int) -> bytes:
    """Return the body. ``deadline``: in seconds of `time.monotonic`.

    Raises TimeoutError after the deadline, HTTPError if the body is cut short, and TooLarge if it has more than
    ``most`` bytes.
    """
    # urllib3's own timeout begins again with every read, so a server that sends single bytes would never reach it.
    parts = _Parts(most)
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            response.close()
            raise TimeoutError("the body did not arrive in time")
        # If the server closes the connection after its answer, there is no socket to set.
        if (sock := getattr(response.connection, "sock", None)) is not None:
            sock.settimeout(remaining)
        part = response.read1(_CHUNK, decode_content=False)
        if not part:
            return parts.take()
        try:
            parts.add(part)
        except errors.TooLarge:
            response.close()  # the rest is not read, so the connection cannot be used again
            raise


class _Parts:
    """A bounded number of bytes that arrive in parts. Each byte is copied only once more, at the end."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """Add a part. Raises TooLarge if there are then too many bytes."""
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._most:
            head = b"".join(self._parts[:_HEAD_PARTS])[:_CHUNK]
            raise errors.TooLarge(f"the answer has more than {self._most} bytes", head)

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        whole = b"".join(self._parts)
        self._parts, self._size = [], 0
        return whole


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream of chunks, without newlines and without blank lines.

    Raises Unavailable if the stream ends inside a line, and TooLarge for a line of more than `MOST_OBJECT_BYTES`.
    """
    # The search is for a byte, because 0x0A is never a part of a longer UTF-8 character.
    parts = _Parts(MOST_OBJECT_BYTES)
    for chunk in chunks:
        head, *tail = chunk.split(b"\n")
        parts.add(head)
        for piece in tail:
            if line := parts.take():
                yield line
            parts.add(piece)
    if parts.take():
        raise errors.Unavailable("the stream ended inside a line")


class Stream:
    """The lines of one streaming answer. One thread reads them, any thread may `abort`, and the context closes it."""

    def __init__(self, response: urllib3.BaseHTTPResponse, what: str) -> None:
        # `abort` shuts the socket down by a second descriptor. To close a socket would not wake the thread that reads
        # it, and the first descriptor may have been closed and given to another file meanwhile.
        self._response = response
        self._what = what
        self._socket = socket.socket(fileno=os.dup(response.fileno()))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()
        self._socket.close()

    def __iter__(self) -> Iterator[bytes]:
        """Yield lines until the server ends the stream, or sends nothing for the read timeout.

        Raises Unavailable if the stream breaks, and WatchLost for a line that is too large.
        """
        # A silent connection may be dead. In both cases the caller opens another one.
        try:
            with transport(self._what):
                yield from split_lines(self._chunks())
        except errors.TooLarge as error:
            # The caller lists again, which shows all later changes.
            message = f"{self._what}: an event of {name_in(error.head)} has more than {MOST_OBJECT_BYTES} bytes"
            raise errors.WatchLost(message) from error

    def _chunks(self) -> Iterator[bytes]:
        with contextlib.suppress(ReadTimeoutError):
            while chunk := self._response.read1(_CHUNK, decode_content=False):
                yield chunk

    def abort(self) -> None:
        """End the stream at once, from any thread. The reader sees it end or break."""
        with contextlib.suppress(OSError):  # the socket is closed or not connected, so there is no reader to wake
            self._socket.shutdown(socket.SHUT_RDWR)
