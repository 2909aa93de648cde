"""A real API server behind the interface of the API server double.

A test decides whether each call of its simulated processes reaches the API server, and whether the answer returns.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Never

import msgspec

from tests.api_double import Delivery, Effect, Handle, delivered
from vcuda.errors import Conflict, NotFound
from vcuda.kube import MERGE_PATCH, Kube, Params
from vcuda.kube.client import Heard
from vcuda.kube.pages import Page

AT_ONCE = json.dumps({"gracePeriodSeconds": 0}).encode()


class ServedApi(Handle):
    """Has the interface of `tests.api_double.Api`, and calls a real API server.

    The tests simulate hours, so the answer to a PUT has the time of ``date`` instead of the server's time. In lists,
    the name of an object replaces its uid: the tests use the name as the uid, but the server generates one.
    """

    def __init__(self, kube: Kube) -> None:
        self.deliver: Delivery = delivered
        self.date: Callable[[], datetime | None] = lambda: None
        self.objects = Objects(kube)
        self._served = kube

    def store(self, path: str, manifest: Mapping[str, Any]) -> bytes:
        body = json.dumps(manifest).encode()
        self.objects.forget()
        try:
            return self._served.post(path.rpartition("/")[0], body)
        except Conflict:
            return self._served.patch(path, body, MERGE_PATCH)

    def remove(self, path: str) -> None:
        self.objects.forget()
        left = json.loads(self._served.delete(path, AT_ONCE))
        if left.get("metadata", {}).get("finalizers"):
            self._served.patch(path, b'{"metadata": {"finalizers": null}}', MERGE_PATCH)

    def clear(self, collection: str) -> None:
        """Delete all objects of a collection, except the ConfigMap that Kubernetes creates in every namespace."""
        for page in self._served.list_pages(collection):
            names = {msgspec.json.decode(each)["metadata"]["name"] for each in page.items}
            for name in names - {"kube-root-ca.crt"}:
                self.remove(f"{collection}/{name}")

    # The methods that the code under test calls

    def get(self, path: str, params: Params | None = None, timeout: float = 10) -> bytes:
        return self.deliver("GET", timeout, lambda: self._served.get(path, params, timeout))

    def post(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        return self._write("POST", timeout, lambda: self._served.post(path, body, params, timeout))

    def post_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        return Heard(self.post(path, body, params, timeout))

    def put_heard(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> Heard:
        dates: list[datetime | None] = []

        def effect() -> bytes:
            answer = self._served.put(path, body, params, timeout)
            dates.append(self.date())
            return answer

        return Heard(self._write("PUT", timeout, effect), date=dates[0])

    def put(self, path: str, body: bytes, params: Params | None = None, timeout: float = 10) -> bytes:
        return self.put_heard(path, body, params, timeout).body

    def patch(
        self, path: str, body: bytes, content_type: str, params: Params | None = None, *, timeout: float = 10
    ) -> bytes:
        patched = self._served.patch
        return self._write("PATCH", timeout, lambda: patched(path, body, content_type, params, timeout=timeout))

    def delete(self, path: str, body: bytes | None = None, params: Params | None = None, timeout: float = 10) -> bytes:
        return self._write("DELETE", timeout, lambda: self._served.delete(path, body, params, timeout))

    def list_pages(
        self, path: str, params: Params | None = None, limit: int = 500, timeout: float = 30, **_bounds: object
    ) -> Iterator[Page]:
        versions: list[str] = []

        def effect() -> bytes:
            pages = list(self._served.list_pages(path, params, limit, timeout))
            versions.append(pages[0].resource_version)
            return json.dumps([_by_name(item) for page in pages for item in page.items]).encode()

        items = msgspec.json.decode(self.deliver("LIST", timeout, effect), type=list[msgspec.Raw])
        yield Page(versions[0], items)

    def _write(self, method: str, timeout: float, write: Effect) -> bytes:
        def effect() -> bytes:
            self.objects.forget()
            return write()

        return self.deliver(method, timeout, effect)


class Objects(Mapping[str, Mapping[str, Any]]):
    """Maps an object's API path to the stored object, which is cached until the next write. It cannot be iterated."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._read: dict[str, Mapping[str, Any]] = {}

    def forget(self) -> None:
        self._read.clear()

    def __getitem__(self, path: str) -> Mapping[str, Any]:
        if path not in self._read:
            try:
                self._read[path] = json.loads(self._kube.get(path))
            except NotFound as error:
                raise KeyError(path) from error
        return self._read[path]

    def __iter__(self) -> Never:
        raise TypeError("the paths of an API server have no end")

    def __len__(self) -> Never:
        raise TypeError("the paths of an API server have no end")


def _by_name(item: msgspec.Raw) -> Any:
    found = msgspec.json.decode(item)
    return {**found, "metadata": {**found["metadata"], "uid": found["metadata"]["name"]}}
