"""Sends requests to the API server with credentials, over connections that stay open. Checks the Kubernetes version."""

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlencode, urlsplit

import msgspec
import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from yaml import YAMLError

from vcuda import errors, k8s_types

Load = Callable[[Configuration], None]
"""A function that reads the current credentials into a client configuration. Raises BadInput if they cannot be read."""

# The official client hardly checks a kubeconfig. For a malformed kubeconfig it may raise any of these exceptions.
_UNREADABLE = (ConfigException, OSError, YAMLError, AttributeError, LookupError, TypeError, ValueError)


def loader(kubeconfig: Path | None, context: str | None) -> Load:
    """Return a function that loads the credentials from ``kubeconfig``.

    If ``kubeconfig`` is None, the returned function reads kubectl's default kubeconfig. In a pod, if both arguments are
    None, the returned function uses the service account of the pod instead.
    """
    if kubeconfig is not None:
        return _from_kubeconfig(str(kubeconfig), context)
    # A context is an entry of a kubeconfig. So if a context is given, the pod's service account is not used.
    if context is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
        return _from_service_account
    return _from_kubeconfig(os.environ.get("KUBECONFIG") or "~/.kube/config", context)


def _from_service_account(configuration: Configuration) -> None:
    try:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # the loader has no type hints
    except _UNREADABLE as error:
        raise errors.BadInput(
            f"KUBERNETES_SERVICE_HOST is set, but the pod's service account cannot be read: {error} "
            "Mount the token of the service account (automountServiceAccountToken), or name a kubeconfig."
        ) from error


def _from_kubeconfig(paths: str, context: str | None) -> Load:
    def load(configuration: Configuration) -> None:
        try:
            load_kube_config(  # type: ignore[no-untyped-call]  # the loader has no type hints
                config_file=paths, context=context, client_configuration=configuration, persist_config=False
            )
        except _UNREADABLE as error:
            where = f"{paths} (context {context})" if context else paths
            raise errors.BadInput(
                f"No usable kubeconfig at {where}: {error} "
                "Name a readable kubeconfig, set KUBECONFIG, or run in a pod with a service account."
            ) from error

    return load


Params = Mapping[str, str | int]
"""Query parameters of a request, by their names in the Kubernetes API."""


class ApiRequest(NamedTuple):
    """A request to the API server. `Sender` adds the credentials."""

    method: str
    path: str
    params: Params | None = None
    body: bytes | None = None
    content_type: str = "application/json"

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


KEPT_SECONDS = 1.0
"""The credentials are looked up again only after this many seconds. A lookup takes a sixth of a request's time."""


class Sender:
    """Sends requests over connections that stay open. Thread-safe. ``load``: reads newer credentials after a 401."""

    # The official client keeps the configuration, renews the token and owns the connection pool. The client's `request`
    # method is not used, because it would encode a JSON body a second time, and send a JSON Patch in bytes as a
    # strategic merge patch. So requests go to the pool directly, with headers from `update_params_for_auth`. Redirects
    # are not followed. `Sender` repeats a request only after a 401, with newer credentials. It repeats nothing else,
    # because only the caller knows whether a repeated write is harmless.

    def __init__(self, api: ApiClient, load: Load, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: tuple[float, Mapping[str, str]] = -math.inf, {}
        # urllib3's pool manager would parse the URL and look up a connection pool for each request. To save time, the
        # pool is looked up once, here. Behind a proxy, the manager must send each request, to adapt it to the proxy.
        manager = api.rest_client.pool_manager
        self._pool = None if manager.proxy else manager.connection_from_url(self.host)
        self._base = urlsplit(self.host).path.rstrip("/")

    @property
    def host(self) -> str:
        return str(self._api.configuration.host)

    def close(self) -> None:
        self._api.close()  # type: ignore[no-untyped-call]  # the method has no type hints

    def send(self, request: ApiRequest, timeout: urllib3.Timeout) -> urllib3.BaseHTTPResponse:
        """Send a request, and return the answer. After a 401, send it once more if there are newer credentials."""
        looked_at, kept = self._kept
        used = kept if self._clock() < looked_at + KEPT_SECONDS else self._look()
        response = self._send_as(used, request, timeout)
        if response.status != HTTPStatus.UNAUTHORIZED or (renewed := self._renewed(used)) == used:
            return response
        response.close()
        return self._send_as(renewed, request, timeout)

    def _send_as(
        self, credentials: Mapping[str, str], request: ApiRequest, timeout: urllib3.Timeout
    ) -> urllib3.BaseHTTPResponse:
        headers, body = {**credentials, "Accept": "application/json"}, request.body
        if body is not None:
            headers["Content-Type"] = request.content_type
        target = f"{request.path}?{urlencode(request.params)}" if request.params else request.path
        unread: dict[str, Any] = {"timeout": timeout, "preload_content": False, "retries": False}
        if self._pool is None:
            manager = self._api.rest_client.pool_manager
            return manager.request(request.method, self.host + target, body=body, headers=headers, **unread)
        return self._pool.urlopen(request.method, self._base + target, body, headers, redirect=False, **unread)

    def _look(self, *, load: bool = False) -> Mapping[str, str]:
        headers: dict[str, str] = {**self._api.default_headers}
        # Only one thread at a time may load credentials, or call `update_params_for_auth`, which may read a new token.
        with self._lock:
            try:
                if load:
                    self._load(self._api.configuration)
                self._api.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
            except (errors.BadInput, ConfigException, OSError) as error:
                raise errors.Unavailable(f"the credentials for the API server cannot be read: {error}") from error
            found = {name: value.strip() for name, value in headers.items()}
            self._kept = self._clock(), found
        return found

    def _renewed(self, rejected: Mapping[str, str]) -> Mapping[str, str]:
        # If another thread has already replaced the ``rejected`` credentials, use the new ones. Otherwise load them
        # here.
        current = self._look()
        return self._look(load=True) if current == rejected else current


OLDEST = (1, 30)  # the oldest supported Kubernetes version, major and minor
_OLDEST = f"v{OLDEST[0]}.{OLDEST[1]}"

_VERSION = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)


class _Info(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that are read from the answer to GET /version. In a managed cloud, ``minor`` may be ``30+``."""

    git_version: str = ""
    major: str = ""
    minor: str = ""


_INFO = msgspec.json.Decoder(_Info)


def check_version(answer: bytes, server: str) -> str:
    """Check the version in the answer to GET /version. Return a warning if the version is unknown, otherwise "".

    Raises UnsupportedVersion if the version is older than `OLDEST`.
    """
    # An unknown version of Kubernetes causes only a warning, because the cluster may work. The version v0.0.0 counts as
    # unknown, because every Kubernetes that was built without a version reports v0.0.0.
    try:
        info = _INFO.decode(answer)
    except k8s_types.UNDECODABLE as error:
        return unknown_version(server, str(error))
    texts = (info.git_version, f"{info.major}.{info.minor}")
    found = next((match for match in map(_VERSION.match, texts) if match and int(match[1])), None)
    if found is None:
        return unknown_version(server, f"gitVersion is {info.git_version[:60]!r}")
    if (int(found[1]), int(found[2])) < OLDEST:
        named = found.string.removeprefix("v")[:60]
        raise errors.UnsupportedVersion(
            f"Kubernetes v{named} at {server} is older than {_OLDEST}, the oldest supported version. "
            "Upgrade the cluster first."
        )
    return ""


def unknown_version(server: str, why: str) -> str:
    return f"the version of Kubernetes at {server} is not known ({why}); the oldest supported version is {_OLDEST}"


def end_process(message: str) -> NoReturn:
    """Print an error, and end the process immediately with status 1. Any thread may call this."""
    sys.stderr.write(f"Error: {message}\n")
    sys.stderr.flush()
    # `sys.exit` would end only the thread that calls it.
    os._exit(1)


@dataclass(slots=True)
class VersionCheck:
    """The check of the Kubernetes version. A `Kube` makes this check once, before its first request.

    ``warn`` is called if the version is unknown. ``end`` is called if the version is too old, and must end the process.
    """

    warn: Callable[[str], None]
    end: Callable[[str], None] = end_process
    passed: bool = field(default=False, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def make(self, read: Callable[[], bytes], server: str) -> None:
        """Check the Kubernetes version in the answer that ``read`` returns.

        If the API server rejects the request that ``read`` sends, the version is unknown. Raises ApiError for a 401.
        """
        try:
            answer, rejected = read(), ""
        except errors.ApiError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise
            answer, rejected = b"", str(error)
        with self._lock:  # if several threads check at once, only one of them warns or ends the process
            if self.passed:
                return
            try:
                warning = unknown_version(server, rejected) if rejected else check_version(answer, server)
            except errors.UnsupportedVersion as error:
                self.end(str(error))
                raise
            self.passed = True
        if warning:
            self.warn(warning)
