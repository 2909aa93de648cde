"""A client of the API server for plain JSON: single requests, watches, and the states of a collection."""

import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException

from vcuda.kube import JSON_PATCH, MERGE_PATCH
from vcuda.quota.rejections import reports_shortage
from vcuda.shallow import shallow

Json = dict[str, Any]

CONNECT_SECONDS = 5
REQUEST_SECONDS = 60


def api_client(server: str, ca_file: Path, token: str) -> ApiClient:
    """Return the official client with this bearer token, for many threads. The caller must close the client."""
    configuration = Configuration(host=server, connection_pool_maxsize=64)
    configuration.ssl_ca_cert = str(ca_file)
    configuration.proxy = None
    return ApiClient(configuration, header_name="Authorization", header_value=f"Bearer {token}")


@dataclass(frozen=True)
class Answer:
    """An answer of the API server.

    ``body``: an object or list after a success (2xx), and otherwise a `Status`. ``warnings``: the texts of the Warning
    headers, which kubectl prints.
    """

    status: int
    body: Json
    headers: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        return str(self.body.get("message", "")) if self.body.get("kind") == "Status" else ""

    @property
    def is_over_quota(self) -> bool:
        """Return whether the request was rejected because it exceeds the quota.

        The status is 429 if the shortage should end within 2 s, and 403 otherwise.
        """
        return self.status in (HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS) and reports_shortage(self.message)

    @property
    def may_pass_soon(self) -> bool:
        """Return whether the request was rejected because of charges that are released soon, or not counted yet."""
        released = "being released" in self.message or "could not be counted in time" in self.message
        return self.status == HTTPStatus.TOO_MANY_REQUESTS or (self.is_over_quota and released)

    def ok(self) -> Json:
        """Return the body of a successful answer. Otherwise raise ApiException with status, message and JSON body."""
        if HTTPStatus.OK <= self.status < HTTPStatus.MULTIPLE_CHOICES:
            return self.body
        raise ApiException(status=self.status, reason=self.message, body=json.dumps(self.body))


def warning_text(header: str) -> str:
    """Return the text of a Warning header such as `299 - "text"`. Its escapes (RFC 7230) are those of JSON."""
    return str(json.loads(header.removeprefix("299 - ")))


@dataclass(frozen=True)
class Rest:
    """Sends requests with JSON over the connections of the client ``api``, as the user of this client."""

    api: ApiClient

    def send(
        self, method: str, path: str, body: object = None, *, content_type: str = "application/json", **query: str
    ) -> Answer:
        """Send a request, and return the answer, whatever its status. Raises urllib3's HTTPError without an answer."""
        headers = {**self.api.default_headers, "Content-Type": content_type}
        url = self._url(path, query)
        response = self.api.call_api(method, url, headers, body=body, _request_timeout=REQUEST_SECONDS)
        warnings = tuple(map(warning_text, response.headers.getlist("Warning")))
        return Answer(response.status, json.loads(shallow(response.response.data or b"{}")), response.headers, warnings)

    def get(self, path: str, **query: str) -> Json:
        return self.send("GET", path, **query).ok()

    def merge_patch(self, path: str, patch: Json) -> Json:
        return self.try_merge_patch(path, patch).ok()

    def try_merge_patch(self, path: str, patch: Json, **query: str) -> Answer:
        return self.send("PATCH", path, patch, content_type=MERGE_PATCH, **query)

    def json_patch(self, path: str, patch: list[Json]) -> Json:
        return self.send("PATCH", path, patch, content_type=JSON_PATCH).ok()

    def watch(self, path: str, seconds: float, **query: str) -> Generator[Json]:
        """Yield watch events as they arrive. The server ends the watch after ``seconds`` seconds, rounded up."""
        whole = int(seconds) + 1
        query = {**query, "watch": "true", "timeoutSeconds": str(whole)}
        timeout = (CONNECT_SECONDS, whole + CONNECT_SECONDS)
        url, headers = self._url(path, query), self.api.default_headers
        with closing(self.api.call_api("GET", url, headers, _request_timeout=timeout).response) as raw:
            if raw.status != HTTPStatus.OK:
                Answer(raw.status, json.loads(raw.data), raw.headers).ok()
            yield from (json.loads(shallow(line)) for line in raw)

    def _url(self, path: str, query: Mapping[str, str]) -> str:
        return f"{self.api.configuration.host}{path}" + (f"?{urlencode(query)}" if query else "")


def states(rest: Rest, path: str, deadline: float, selectors: dict[str, str]) -> Generator[list[Json]]:
    """Yield all objects of the collection after each change, until ``deadline`` on the monotonic clock.

    A watch that ends earlier is started again.
    """
    while (left := deadline - time.monotonic()) > 0:
        listing = rest.get(path, **selectors)
        objects = {item["metadata"]["uid"]: item for item in listing["items"]}
        yield list(objects.values())
        version = listing["metadata"]["resourceVersion"]
        with closing(rest.watch(path, left, resourceVersion=version, **selectors)) as events:
            for event in events:
                if event["type"] == "ERROR":
                    if event["object"].get("code") != HTTPStatus.GONE:
                        raise RuntimeError(f"the watch ended with {event['object']}")
                    break  # etcd has deleted the version of the watch; a new LIST is needed
                objects.pop(uid := event["object"]["metadata"]["uid"], None)
                if event["type"] != "DELETED":
                    objects[uid] = event["object"]
                yield list(objects.values())
