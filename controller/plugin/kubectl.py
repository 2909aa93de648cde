"""Requests to the API server by kubectl: with its kubeconfig, its credentials and its proxy.

A kubectl plugin has kubectl at hand. So it needs no client of its own, which would need binary packages.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, urlencode

from vcuda import errors

Params = Mapping[str, str | int]
"""Query parameters by Kubernetes' own names."""

MOST_BYTES = 16 * 2**20
"""Bytes that are read of one answer. etcd stores objects of up to 1.5 MiB, which JSON may write as 9 MiB."""

PAGE = 200
"""Objects of the first page of a LIST. A page that is too large is requested again with a quarter of them."""

SECONDS = 30
"""Seconds for one request."""

DEFAULT_NAMESPACE = "default"


class Answer(Protocol):
    """An answer: its body, and the warnings of the API server and its webhooks."""

    @property
    def body(self) -> bytes:
        """The body, as JSON."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings, in order."""


class PageOfObjects(Protocol):
    """One page of a LIST."""

    @property
    def items(self) -> Sequence[Any]:
        """The objects: JSON as bytes, or decoded."""


class Api(Protocol):
    """The part of an API server's client that the plugin needs. Every failure is an exception of `vcuda.errors`."""

    def get(self, path: str, params: Params | None = None) -> bytes:
        """Read one object."""

    def post_heard(self, path: str, body: bytes, params: Params | None = None) -> Answer:
        """Create the object in ``body`` (JSON), and return it with the warnings."""

    def list_pages(self, path: str, params: Params | None = None) -> Iterator[PageOfObjects]:
        """Yield the pages of a LIST."""


def objects_in(api: Api, path: str, params: Params | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of a LIST."""
    for page in api.list_pages(path, params):
        for item in page.items:
            yield item if isinstance(item, dict) else json.loads(bytes(item))


class DecodedPage(NamedTuple):
    """One page of a LIST, decoded."""

    items: Sequence[dict[str, Any]]


class Reply(NamedTuple):
    """A body with warnings."""

    body: bytes
    warnings: tuple[str, ...] = ()


class KubectlRun(NamedTuple):
    """The end of a run of kubectl."""

    status: int
    output: bytes
    told: str
    """The text on standard error."""


def segment(name: str) -> str:
    """Return a name as one segment of a path. Raises BadInput for a name that no object can have."""
    # kubectl decodes a path before it sends it, so a slash in a name cannot be escaped.
    if quote(name, safe="") != name or name in ("", ".", ".."):
        raise errors.BadInput(f"{name!r} cannot be the name of an object")
    return name


@dataclass(frozen=True, slots=True)
class Kubectl:
    """The API server of a kubectl program, whose flags name the kubeconfig and the context."""

    command: tuple[str, ...]

    @classmethod
    def find(cls, kubeconfig: Path | None = None, context: str | None = None) -> "Kubectl":
        """Return the kubectl on PATH. Without ``kubeconfig`` and ``context`` it uses its own. Raises BadInput."""
        program = shutil.which("kubectl")
        if program is None:
            raise errors.BadInput("kubectl is not on PATH; kubectl gpuquota reaches the cluster by it")
        flags = (("--kubeconfig", kubeconfig), ("--context", context))
        return cls((program, *(f"{flag}={value}" for flag, value in flags if value)))

    def namespace(self) -> str:
        """Return the namespace of the current context; ``default`` if it has none, or if there is no context."""
        done = self._run("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}")
        return (done.output.decode(errors="replace") if done.status == 0 else "") or DEFAULT_NAMESPACE

    def get(self, path: str, params: Params | None = None) -> bytes:
        """Read one object. Raises NotFound, Forbidden or another ApiError, Unavailable, and BadInput."""
        return self._send("get", path, params).body

    def post_heard(self, path: str, body: bytes, params: Params | None = None) -> Reply:
        """Create the object in ``body``, and return it with the warnings. Raises as `get` does."""
        return self._send("create", path, params, "--filename=-", body=body)

    def list_pages(self, path: str, params: Params | None = None) -> Iterator[DecodedPage]:
        """Yield the pages of one LIST. Raises as `get` does, and TooLarge for an object that is too large."""
        objects, token = PAGE, ""
        while True:
            query = {**(params or {}), "limit": objects, **({"continue": token} if token else {})}
            try:
                listed = json.loads(self.get(path, query))
            except errors.TooLarge:
                if objects == 1:
                    raise
                objects = max(1, objects // 4)
                continue
            yield DecodedPage(listed.get("items") or [])
            token = listed["metadata"].get("continue", "")
            if not token:
                return

    def _send(self, verb: str, path: str, params: Params | None, *flags: str, body: bytes | None = None) -> Reply:
        target = f"{path}?{urlencode(params)}" if params else path
        done = self._run(verb, f"--raw={target}", *flags, f"--request-timeout={SECONDS}s", body=body)
        warnings, told = split_warnings(done.told)
        if len(done.output) > MOST_BYTES:
            raise errors.TooLarge(f"{path}: the answer has more than {MOST_BYTES} bytes", b"")
        if done.status:
            raise failure(told)
        return Reply(done.output, warnings)

    def _run(self, *arguments: str, body: bytes | None = None) -> KubectlRun:
        # Files cannot fill up as pipes can, so that neither side waits for the other.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told:
            given.write(body or b"")
            given.seek(0)
            command = (*self.command, *arguments)
            with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=told) as running:  # noqa: S603  # kubectl, by its path
                output = running.stdout.read(MOST_BYTES + 1) if running.stdout else b""
                if len(output) > MOST_BYTES:
                    running.kill()
            told.seek(0)
            return KubectlRun(running.returncode, output, told.read(MOST_BYTES).decode(errors="replace"))


_WARNING = re.compile(r"^Warning: (.*)\n?", re.MULTILINE)


def split_warnings(told: str) -> tuple[tuple[str, ...], str]:
    """Return the warnings that kubectl printed, and the rest of its text."""
    return tuple(_WARNING.findall(told)), _WARNING.sub("", told).strip()


# `StandardErrorMessage` and `checkErr` in k8s.io/kubectl (pkg/cmd/util/helpers.go) write these.
_REFUSED = re.compile(r"Error from server(?: \((?P<reason>\w+)\))?: (?P<message>.*)", re.DOTALL)
_INVALID = re.compile(r"The (?:request|\w+ \"[^\"]*\") is invalid.*", re.DOTALL)
_BY_REASON: Mapping[str, tuple[type[errors.ApiError], HTTPStatus]] = {
    "Forbidden": (errors.Forbidden, HTTPStatus.FORBIDDEN),
    "NotFound": (errors.NotFound, HTTPStatus.NOT_FOUND),
    "AlreadyExists": (errors.Conflict, HTTPStatus.CONFLICT),
    "Conflict": (errors.Conflict, HTTPStatus.CONFLICT),
    "Expired": (errors.Gone, HTTPStatus.GONE),
    "Invalid": (errors.ApiError, HTTPStatus.UNPROCESSABLE_ENTITY),
}
_UNAVAILABLE = frozenset({"InternalError", "ServerTimeout", "ServiceUnavailable", "Timeout", "TooManyRequests"})
_NO_LOGIN = "error: You must be logged in to the server"


class PlainRefusal(errors.ApiError):
    """A refusal whose HTTP status kubectl does not print: that of a webhook that gives no reason, for example."""

    def __str__(self) -> str:
        return self.message


def failure(told: str) -> errors.VcudaError:
    """Return the error that kubectl's text says.

    A refusal of the API server is an ApiError, a wrong flag or kubeconfig is BadInput, and everything else Unavailable.
    """
    if found := _REFUSED.fullmatch(told):
        reason, message = found["reason"] or "", found["message"]
        if reason in _UNAVAILABLE:
            return errors.Unavailable(f"{message} ({reason})")
        kind, status = _BY_REASON.get(reason, (PlainRefusal, HTTPStatus.BAD_REQUEST))
        return kind(status, message)
    if _INVALID.fullmatch(told):
        return errors.ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, told)
    if told.startswith(_NO_LOGIN):
        return errors.ApiError(HTTPStatus.UNAUTHORIZED, told.removeprefix("error: "))
    if told.startswith("error: "):
        return errors.BadInput(told.removeprefix("error: "))
    return errors.Unavailable(told or "kubectl failed without a message")
