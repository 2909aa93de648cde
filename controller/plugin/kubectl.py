"""Sends requests to the API server by running kubectl, which uses the user's kubeconfig, credentials and proxy.

So the plugin needs no HTTP client. An HTTP client would need binary packages.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from vcuda import errors
from vcuda.shallow import shallow

Params = Mapping[str, str | int]

MAX_ANSWER_BYTES = 16 * 2**20
"""The maximum size of a response in bytes. An object in etcd has at most 1.5 MiB, which may be 9 MiB as JSON."""

PAGE = 200
"""The number of objects on the first page of a LIST. If a page is too large, a quarter as many are requested."""

SECONDS = 30
"""The timeout of one request, in seconds."""

DEFAULT_NAMESPACE = "default"

_INTEGER_DIGITS = 20  # no integer of a field that is read has so many


class Reply(NamedTuple):
    """The answer to a request: the body as JSON, and the warnings of the API server and of its webhooks."""

    body: bytes
    warnings: tuple[str, ...] = ()


class KubectlRun(NamedTuple):
    """The result of running kubectl: the exit status and the output."""

    status: int
    output: bytes
    stderr: str


def in_path(name: str) -> str:
    """Return a name as one segment of a URL path. If no object can have this name, raise BadInput."""
    # A slash in a name cannot be escaped, because kubectl decodes the path before it sends the request.
    if quote(name, safe="") != name or name in ("", ".", ".."):
        raise errors.BadInput(f"{name!r} cannot be the name of an object")
    return name


def read_json(body: bytes) -> Any:
    """Return the JSON of the API server. Values that are nested too deep for Python become None. No field that the
    plugin reads has such values."""
    return json.loads(shallow(body).decode(errors="replace"), parse_int=_number)


def _number(digits: str) -> float:
    # Python raises ValueError for an integer of more than 4,300 digits.
    return int(digits) if len(digits) < _INTEGER_DIGITS else float(digits)


@dataclass(frozen=True, slots=True)
class Kubectl:
    """An API client that runs kubectl. ``command``: kubectl, with its flags --kubeconfig and --context."""

    command: tuple[str, ...]

    @classmethod
    def find(cls, kubeconfig: Path | None = None, context: str | None = None) -> "Kubectl":
        """Return a client for this kubeconfig and context. Raises BadInput if there is no kubectl on PATH."""
        program = shutil.which("kubectl")
        if program is None:
            raise errors.BadInput("kubectl is not on PATH; kubectl gpuquota needs kubectl to reach the cluster")
        flags = (("--kubeconfig", kubeconfig), ("--context", context))
        return cls((program, *(f"{flag}={value}" for flag, value in flags if value)))

    def namespace(self) -> str:
        done = self._run("config", "view", "--minify", "--output=jsonpath={.contexts[0].context.namespace}")
        return (done.output.decode(errors="replace") if done.status == 0 else "") or DEFAULT_NAMESPACE

    def get(self, path: str, params: Params | None = None) -> bytes:
        """Read one object. Raises NotFound, Forbidden or another ApiError, Unavailable, and BadInput."""
        return self._send("get", path, params).body

    def post_heard(self, path: str, body: bytes, params: Params | None = None) -> Reply:
        """Create the object in ``body``. Return the stored object and the warnings. Raises the same errors as `get`."""
        return self._send("create", path, params, "--filename=-", body=body)

    def list_objects(self, path: str, params: Params | None = None) -> Iterator[dict[str, Any]]:
        """Yield the objects of a LIST. Raises the same errors as `get`, and TooLarge if one object is too large."""
        objects, token = PAGE, ""
        while True:
            query = {**(params or {}), "limit": objects, **({"continue": token} if token else {})}
            try:
                listed = read_json(self.get(path, query))
            except errors.TooLarge:
                if objects == 1:
                    raise
                objects = max(1, objects // 4)
                continue
            yield from listed.get("items") or []
            token = listed["metadata"].get("continue", "")
            if not token:
                return

    def _send(self, verb: str, path: str, params: Params | None, *flags: str, body: bytes | None = None) -> Reply:
        target = f"{path}?{urlencode(params)}" if params else path
        done = self._run(verb, f"--raw={target}", *flags, f"--request-timeout={SECONDS}s", body=body)
        warnings, stderr = split_warnings(done.stderr)
        if len(done.output) > MAX_ANSWER_BYTES:
            raise errors.TooLarge(f"{path}: the answer has more than {MAX_ANSWER_BYTES} bytes", b"")
        if done.status:
            raise failure(stderr)
        return Reply(done.output, warnings)

    def _run(self, *arguments: str, body: bytes | None = None) -> KubectlRun:
        # kubectl's stdin and stderr are files. With pipes, kubectl and the plugin could wait for each other forever.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as stderr:
            given.write(body or b"")
            given.seek(0)
            command = (*self.command, *arguments)
            with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=stderr) as running:  # noqa: S603  # runs kubectl
                output = running.stdout.read(MAX_ANSWER_BYTES + 1) if running.stdout else b""
                if len(output) > MAX_ANSWER_BYTES:
                    running.kill()
            stderr.seek(0)
            return KubectlRun(running.returncode, output, stderr.read(MAX_ANSWER_BYTES).decode(errors="replace"))


_WARNING = re.compile(r"^Warning: (.*)\n?", re.MULTILINE)


def split_warnings(stderr: str) -> tuple[tuple[str, ...], str]:
    return tuple(_WARNING.findall(stderr)), _WARNING.sub("", stderr).strip()


# kubectl prints errors in these forms (`StandardErrorMessage` and `checkErr` of k8s.io/kubectl in pkg/cmd/util).
_REJECTED = re.compile(r"Error from server(?: \((?P<reason>\w+)\))?: (?P<message>.*)", re.DOTALL)
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


class PlainRejection(errors.ApiError):
    """A rejection for which kubectl printed no known reason of a Status, for example if a webhook states no reason."""

    def __str__(self) -> str:
        return self.message


def failure(stderr: str) -> errors.VcudaError:
    """Return the error for kubectl's text on standard error.

    The result is an ApiError if the API server rejected the request, BadInput if a flag or the kubeconfig is wrong, and
    Unavailable otherwise.
    """
    if found := _REJECTED.fullmatch(stderr):
        reason, message = found["reason"] or "", found["message"]
        if reason in _UNAVAILABLE:
            return errors.Unavailable(f"{message} ({reason})")
        kind, status = _BY_REASON.get(reason, (PlainRejection, HTTPStatus.BAD_REQUEST))
        return kind(status, message)
    if _INVALID.fullmatch(stderr):
        return errors.ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, stderr)
    if stderr.startswith(_NO_LOGIN):
        return errors.ApiError(HTTPStatus.UNAUTHORIZED, stderr.removeprefix("error: "))
    if stderr.startswith("error: "):
        return errors.BadInput(stderr.removeprefix("error: "))
    return errors.Unavailable(stderr or "kubectl failed without a message")
