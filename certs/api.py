"""Requests to the API server in plain JSON, over the official client's transport; no typed model is written back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from yaml import YAMLError

Json = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

TIMEOUT = 30.0
"""Seconds for one request."""

PAGE = "500"
"""Objects on one page of a list; kubectl and client-go ask for as many."""

_UNREADABLE = (ConfigException, OSError, YAMLError, AttributeError, LookupError, TypeError, ValueError)


class ApiFault(Exception):
    """The API server did not do what it was asked to; the message says what, and why."""


class Forbidden(ApiFault):
    """We have no right to what was asked."""


class Conflicted(ApiFault):
    """Somebody else has written the object since it was read: nothing was changed."""


class Unreachable(ApiFault):
    """No answer, or one that says to try again; a write may have been done all the same."""


class NoCredentials(ApiFault):
    """There is no usable kubeconfig or service account."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The object in a good answer, and the API server's own time."""

    body: Json
    date: datetime | None


@dataclass(frozen=True, slots=True)
class Api:
    """A handle on one API server; ``Api.connect`` makes it."""

    client: ApiClient

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> Api:
        """Read the kubeconfig given; else the service account in a pod; else KUBECONFIG or ~/.kube/config.

        Raises NoCredentials. Nothing is sent yet.
        """
        configuration = Configuration(retries=False)
        try:
            if kubeconfig is None and os.environ.get("KUBERNETES_SERVICE_HOST"):
                load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # the loader has no type hints
            else:
                load_kube_config(  # type: ignore[no-untyped-call]  # the loader has no type hints
                    config_file=str(kubeconfig) if kubeconfig else None,
                    client_configuration=configuration,
                    persist_config=False,
                )
        except _UNREADABLE as error:
            raise NoCredentials(
                f"no usable kubeconfig or service account: {error}; name one with --kubeconfig"
            ) from error
        return cls(ApiClient(configuration))

    @property
    def server(self) -> str:
        """Its URL as people are told it: a kubeconfig may have a password in it."""
        host = urlsplit(self.client.configuration.host)
        return f"{host.scheme}://{host.netloc.rpartition('@')[2]}"

    def get(self, path: str, **query: str) -> Reply | None:
        """Return the object or list at ``path``; None where there is none. Raises ApiFault."""
        status, body, date = self._send("GET", f"{path}?{urlencode(query)}" if query else path)
        return None if status == HTTPStatus.NOT_FOUND else Reply(_checked(f"GET {path}", status, body), date)

    def list(self, path: str, **query: str) -> Iterator[Json]:
        """Yield the objects of the collection at ``path``, page by page; none where there is no such kind.

        Raises ApiFault.
        """
        query = {**query, "limit": PAGE}
        while reply := self.get(path, **query):
            yield from reply.body.get("items") or ()
            query["continue"] = (reply.body.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return

    def create(self, path: str, body: Json) -> None:
        """Create an object; Conflicted where its name is taken."""
        self._write("POST", path, body, "application/json")

    def patch(self, path: str, body: object, content_type: str) -> None:
        """Change an object; Conflicted where the patch sets a resourceVersion that is not the newest."""
        self._write("PATCH", path, body, content_type)

    def _write(self, method: str, path: str, body: object, content_type: str) -> None:
        status, answer, _ = self._send(method, path, body, content_type)
        _checked(f"{method} {path}", status, answer)

    def _send(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[int, Json, datetime | None]:
        """One request, whatever its status; Unreachable where no whole answer came."""
        try:
            headers = {**self.client.default_headers, "Accept": "application/json", "Content-Type": content_type}
            self.client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
            response = self.client.call_api(
                method, self.client.configuration.host + path, headers, body=body, _request_timeout=TIMEOUT
            ).response
            return response.status, _decoded(response.data), _date(response.headers.get("Date"))
        except (urllib3.exceptions.HTTPError, ApiException, OSError, ConfigException) as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error


def _checked(what: str, status: int, body: Json) -> Json:
    """Return the object of a good answer; else raise the fault, with the API server's own sentence."""
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return body
    message = f"{what}: {body.get('message') or 'no reason given'} (HTTP {status})"
    if status == HTTPStatus.FORBIDDEN:
        raise Forbidden(message)
    if status == HTTPStatus.CONFLICT or (status == HTTPStatus.NOT_FOUND and what.startswith("PATCH")):
        raise Conflicted(message)
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise Unreachable(message)
    raise ApiFault(message)


def _decoded(data: bytes) -> Json:
    """The JSON object in an answer; an answer that is none comes from something between, which says so in words."""
    try:
        body = json.loads(data)
    except ValueError:
        return {"message": data[:200].decode(errors="replace").strip()}
    return body if isinstance(body, dict) else {"message": "the answer is no JSON object"}


def _date(header: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(header) if header else None
    except ValueError:
        return None
