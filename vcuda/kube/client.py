"""A client of the API server. Bodies of requests and answers are bytes. All failures raise errors of `vcuda.errors`."""

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
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec
import urllib3
from kubernetes.client import ApiClient, Configuration
from urllib3.exceptions import HTTPError, ReadTimeoutError, TimeoutError as UrllibTimeoutError

from vcuda import __version__, errors
from vcuda.k8s_types import UNDECODABLE
from vcuda.kube.authorization import AuthorizerGrace
from vcuda.kube.connection import ApiRequest, Params, Sender, VersionCheck, loader
from vcuda.kube.pages import MAX_OBJECT_BYTES, Page, Pager, Skip, name_in

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"

# A 429 that has a cause with this reason means that a PodDisruptionBudget prevents the eviction of a pod
# (DisruptionBudgetCause in k8s.io/api, policy/v1).
DISRUPTION_BUDGET = "DisruptionBudget"

_BY_STATUS = {403: errors.Forbidden, 404: errors.NotFound, 409: errors.Conflict, 410: errors.Gone}


class Details(msgspec.Struct, frozen=True):
    """The field ``details`` of a Kubernetes Status. Only its causes are decoded."""

    causes: tuple[errors.Cause, ...] | None = None


class Status(msgspec.Struct, frozen=True):
    """A Kubernetes Status: the body of every error answer, and the object of a watch event of type ERROR."""

    message: str = ""
    code: int = 0
    details: Details | None = None

    @property
    def causes(self) -> tuple[errors.Cause, ...]:
        return (self.details and self.details.causes) or ()


class Heard(NamedTuple):
    """An answer of the API server.

    ``warnings``: the texts of the Warning headers, which the API server and admission webhooks set.
    ``date``: the time of the answer by the API server's clock; None if the answer has no valid Date header.
    """

    body: bytes
    warnings: tuple[str, ...] = ()
    date: datetime.datetime | None = None


_STATUS = msgspec.json.Decoder(Status)

LIST_SECONDS = 60.0
"""The default time limit of a whole LIST with all its pages, in seconds."""


@dataclass(frozen=True, slots=True)
class Kube:
    """A client of one API server. All methods are thread-safe. `Kube.connect` creates a client.

    A ``path`` starts with ``/api`` or ``/apis``. A ``timeout`` is the seconds for one request with its answer.

    If the API server rejects a request, every method raises NotFound, Conflict, Gone or another ApiError with the
    server's message. For status 429 or 5xx, a failed or broken connection, and a timeout, every method raises
    Unavailable. If ``grace`` is set, a 403 from an API server that may have just started also raises Unavailable.
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
        """Return a client of the API server. No request is sent yet.

        If ``kubeconfig`` and ``context`` are None and KUBERNETES_SERVICE_HOST is set, the client uses the pod's service
        account. Otherwise, without ``kubeconfig``, it reads KUBECONFIG or ~/.kube/config. ``pool_size``: the number of
        connections that stay open. ``version_check``: checks the Kubernetes version before the first request. ``grace``
        turns a 403 from a starting API server into Unavailable; the callers must then retry.

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
        self.sender.close()

    def get(self, path: str, params: Params | None = None, timeout: float = 10, most: int = MAX_OBJECT_BYTES) -> bytes:
        """Return one object as JSON. The read is consistent (from etcd), unless ``params`` set a resourceVersion.

        Raises TooLarge if the answer has more than ``most`` bytes.
        """
        return self._heard(ApiRequest("GET", path, params), timeout, most).body

    def get_heard(self, path: str, timeout: float = 10) -> Heard:
        """Read one object, as `get` does. Return its JSON together with the time of the answer."""
        return self._heard(ApiRequest("GET", path), timeout)

    def post(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        """Create the object in ``body`` (JSON), and return it. Raises Conflict if an object of this name exists."""
        return self.post_heard(path, body, params, timeout).body

    def post_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        """Create an object, as `post` does. Return the stored object together with the API server's warnings."""
        return self._heard(ApiRequest("POST", path, params, body), timeout)

    def put(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        """Replace the object by ``body`` (JSON). Raises Conflict unless ``body`` has the newest resourceVersion."""
        return self.put_heard(path, body, params, timeout).body

    def put_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        """Replace an object, as `put` does. Return it as stored, together with the time of the answer."""
        return self._heard(ApiRequest("PUT", path, params, body), timeout)

    def patch(
        self, path: str, body: bytes, content_type: str, params: Params | None = None, *, timeout: float = 10
    ) -> bytes:
        """Apply the patch in ``body`` to an object. ``content_type``: MERGE_PATCH, JSON_PATCH or another patch type."""
        return self._heard(ApiRequest("PATCH", path, params, body, content_type), timeout).body

    def delete(self, path: str, body: bytes | None = None, params: Params | None = None, timeout: float = 10) -> bytes:
        """Delete one object. ``body``: DeleteOptions in JSON, for example with preconditions."""
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
        exact: str = "",
    ) -> Iterator[Page]:
        """Yield the pages of one consistent LIST. A page has at most ``limit`` objects and a few MiB.

        ``timeout``: seconds for one page. ``seconds``: seconds for the whole LIST, including the caller's work between
        pages. ``skip``: called with each object of more than `MAX_OBJECT_BYTES`. The pages omit such an object.
        ``exact``: the resourceVersion of the LIST; empty for the newest.

        Without ``skip``, such an object raises TooLarge. Raises ListOverdue after ``seconds``. Raises Gone if etcd has
        dropped the resourceVersion of the LIST, by default after 5 minutes. The caller must then begin a new LIST.
        """

        # The pages of one LIST may have different limits. The continue token contains only the version of the LIST and
        # the key at which the next page starts (EncodeContinue in k8s.io/apiserver, pkg/storage/continue.go).
        version = {"resourceVersion": exact, "resourceVersionMatch": "Exact"} if exact else {}

        def fetch(objects: int, token: str, timeout: float, most: int) -> bytes:
            query = {**(params or {}), "limit": objects, **({"continue": token} if token else version)}
            return self.get(path, query, timeout, most)

        yield from Pager(fetch, f"LIST {path}", most=limit, timeout=timeout, seconds=seconds, skip=skip)

    def stream(
        self, path: str, params: Params | None = None, *, connect_timeout: float = 10, read_timeout: float
    ) -> "Stream":
        """Send a GET, and return its answer as a stream, which ends after ``read_timeout`` seconds without data."""
        self._check_version(connect_timeout)
        request = ApiRequest("GET", path, params)
        with transport(str(request)):
            response = self.sender.send(request, urllib3.Timeout(connect=connect_timeout, read=read_timeout))
            if response.status == HTTPStatus.OK:
                return Stream(response, str(request))
            body = read_response(response, time.monotonic() + connect_timeout, MAX_OBJECT_BYTES)
        raise self._rejection(str(request), response.status, body)

    def _check_version(self, timeout: float) -> None:
        check = self.version_check
        if check is not None and not check.passed:
            host = urlsplit(self.sender.host)
            server = f"{host.scheme}://{host.netloc.rpartition('@')[2]}"  # messages must not show the user and password
            check.make(lambda: self._answer(ApiRequest("GET", "/version"), timeout).body, server)

    def _heard(self, request: ApiRequest, timeout: float, most: int = MAX_OBJECT_BYTES) -> Heard:
        self._check_version(timeout)
        return self._answer(request, timeout, most)

    def _answer(self, request: ApiRequest, timeout: float, most: int = MAX_OBJECT_BYTES) -> Heard:
        deadline = time.monotonic() + timeout
        with transport(str(request)):
            response = self.sender.send(request, urllib3.Timeout(total=timeout))
            answer = read_response(response, deadline, most)
        if HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
            headers = response.headers
            return Heard(answer, warnings_in(headers.getlist("Warning")), _date(headers.get("Date")))
        raise self._rejection(str(request), response.status, answer)

    def _rejection(self, what: str, status: int, body: bytes) -> errors.VcudaError:
        error = rejection(what, status, body)
        if self.grace and isinstance(error, errors.Forbidden) and self.grace.covers(error.message):
            return errors.Unavailable(f"{what}: {error}. The API server may have just started, so retry.")
        return error


def upsert(kube: Kube, collection: str, manifest: Mapping[str, Any]) -> bytes:
    """Patch an object with the fields of ``manifest``. If the object does not exist, create it. Return it as stored.

    Fields that are not in ``manifest`` stay unchanged. Raises Conflict if another client creates the object first.
    """
    body = msgspec.json.encode(manifest)
    try:
        return kube.patch(f"{collection}/{segment(manifest['metadata']['name'])}", body, MERGE_PATCH)
    except errors.NotFound:
        # A merge patch cannot create objects. Server-side apply can, but also takes over fields of other writers.
        return kube.post(collection, body)


def rejection(what: str, status: int, body: bytes) -> errors.VcudaError:
    """Return the exception for an answer with an HTTP status other than 2xx. Its message is taken from ``body``."""
    try:
        reported = _STATUS.decode(body)
    except UNDECODABLE:
        reported = Status(body[:200].decode(errors="replace").strip())
    message = reported.message or "no reason given"
    budget = next((cause for cause in reported.causes if cause.reason == DISRUPTION_BUDGET), None)
    if status == HTTPStatus.TOO_MANY_REQUESTS and budget:
        return errors.HeldByBudget(f"{what}: {message} (HTTP {status})", budget.message or message)
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return errors.Unavailable(f"{what}: {message} (HTTP {status})")
    return _BY_STATUS.get(status, errors.ApiError)(status, message, reported.causes, what)


def segment(name: str) -> str:
    # Users choose some names, for example in flags and manifests. A slash in a name could address another object.
    return quote(name, safe="")


_WARNING = re.compile(r'\d{3} \S+ "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


def warnings_in(headers: Iterable[str]) -> tuple[str, ...]:
    """Return the warning texts in the ``Warning`` headers of an answer. Malformed header values are left out."""
    texts = (_ESCAPED.sub(r"\1", quoted) for header in headers for quoted in _WARNING.findall(header))
    # http.client decodes a header as Latin-1, but the API server sends UTF-8. So encode each text and decode it again.
    return tuple(text.encode("latin-1").decode("utf-8", "replace") for text in texts)


def _date(header: str | None) -> datetime.datetime | None:
    try:
        return parsedate_to_datetime(header) if header else None
    except ValueError:
        return None


_CHUNK = 64 * 1024


@contextlib.contextmanager
def transport(what: str) -> Iterator[None]:
    """Turn every connection error in the ``with`` block into Unavailable. ``what`` names the request in messages."""
    try:
        yield
    except (UrllibTimeoutError, TimeoutError) as error:
        raise errors.TimedOut(f"{what}: {type(error).__name__}: {error}") from error
    except (HTTPError, OSError) as error:
        raise errors.Unavailable(f"{what}: {type(error).__name__}: {error}") from error
    except errors.TooLarge as error:
        raise errors.TooLarge(f"{what}: {error}", error.head) from error


def read_response(response: urllib3.BaseHTTPResponse, deadline: float, most: int) -> bytes:
    """Return the body of an HTTP response. ``deadline``: a time of `time.monotonic`, in seconds.

    Raises TimeoutError after the deadline, HTTPError for a truncated body, and TooLarge for more than ``most`` bytes.
    """
    # urllib3 restarts its own timeout at every read, so a server that sends one byte at a time would never time out.
    body = bytearray()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            response.close()
            raise TimeoutError("the body of the answer did not arrive in time")
        # If the server has closed the connection after its response, there is no socket that needs a timeout.
        if (sock := getattr(response.connection, "sock", None)) is not None:
            sock.settimeout(remaining)
        part = response.read1(_CHUNK, decode_content=False)
        if not part:
            return bytes(body)
        body += part
        if len(body) > most:
            response.close()  # the body is not read to its end, so the connection cannot be reused
            raise _too_large(body, most)


def _too_large(text: bytearray, most: int) -> errors.TooLarge:
    # The error has the first bytes of the answer, because they contain the name of the too large object.
    return errors.TooLarge(f"the answer has more than {most} bytes", bytes(text[:_CHUNK]))


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream that arrives in chunks. Newlines and blank lines are left out.

    Raises Unavailable if the stream ends inside a line, and TooLarge if a line exceeds `MAX_OBJECT_BYTES`.
    """
    # Undecoded bytes can be split at newlines, because the byte 0x0A is never a part of a multi-byte UTF-8 character.
    line = bytearray()
    for chunk in chunks:
        head, *tail = chunk.split(b"\n")
        line += head
        if len(line) > MAX_OBJECT_BYTES:
            raise _too_large(line, MAX_OBJECT_BYTES)
        if tail:
            *whole, rest = tail
            yield from filter(None, (bytes(line), *whole))
            line = bytearray(rest)
    if line:
        raise errors.Unavailable("the API server ended the stream inside a line")


class Stream:
    """An HTTP response. One thread reads it line by line. Any thread may call `abort`. ``with`` closes the response."""

    def __init__(self, response: urllib3.BaseHTTPResponse, what: str) -> None:
        # `abort` shuts the socket down, because a close would not wake the thread that reads from the socket. `abort`
        # uses a duplicate of the file descriptor, because the number of a closed descriptor may belong to another file.
        self._response = response
        self._what = what
        self._socket = socket.socket(fileno=os.dup(response.fileno()))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_error: object) -> None:
        self._response.close()
        self._socket.close()

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines of the response until the server ends it, or sends nothing for as long as the read timeout.

        Raises Unavailable if the connection breaks, and WatchLost if a line is too large.
        """
        # If no data arrives, the connection may be dead. The stream then ends without an error, and the caller opens a
        # new one.
        try:
            with transport(self._what):
                yield from split_lines(self._chunks())
        except errors.TooLarge as error:
            # WatchLost makes the caller list all objects. So the object's change is not missed, although its event is
            # lost.
            message = f"{self._what}: an event of {name_in(error.head)} has more than {MAX_OBJECT_BYTES} bytes"
            raise errors.WatchLost(message) from error

    def _chunks(self) -> Iterator[bytes]:
        with contextlib.suppress(ReadTimeoutError):
            while chunk := self._response.read1(_CHUNK, decode_content=False):
                yield chunk

    def abort(self) -> None:
        """End the stream immediately. In the thread that reads the lines, the iteration ends or raises Unavailable."""
        with contextlib.suppress(OSError):  # if the socket is already closed, no thread reads from it
            self._socket.shutdown(socket.SHUT_RDWR)
