"""A double of the API server. It rejects writes with an old resourceVersion, and a test decides which calls fail."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Never, Protocol, cast

import jsonpatch
import msgspec
from jsonpointer import JsonPointerException

from vcuda.errors import ApiError, Conflict, NotFound, Unavailable, VcudaError
from vcuda.kube import JSON_PATCH, Kube, Params
from vcuda.kube.client import Heard
from vcuda.kube.pages import Page

Effect = Callable[[], bytes]
"""Performs a call on the API server. It returns the answer, or raises the error of a rejected call."""

Delivery = Callable[[str, float, Effect], bytes]
"""Decides whether a call and its answer arrive. The arguments: the method, the timeout in seconds, and the effect."""


def delivered(_method: str, _timeout: float, effect: Effect) -> bytes:
    return effect()


def lost_request(_method: str, _timeout: float, _effect: Effect) -> bytes:
    """Lose a call before it reaches the API server. The caller gets a timeout."""
    raise Unavailable("timed out")


def lost_reply(_method: str, _timeout: float, effect: Effect) -> bytes:
    """Perform the call, then lose the answer. The caller gets a timeout."""
    effect()
    raise Unavailable("timed out")


def rejected(error: VcudaError, *methods: str) -> Delivery:
    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method in methods:
            raise error
        return effect()

    return deliver


def before(method: str, act: Callable[[], object], times: int = 1) -> Delivery:
    """Return a delivery that calls ``act`` before each of the first ``times`` calls with an HTTP method."""
    left = [times]

    def deliver(called: str, _timeout: float, effect: Effect) -> bytes:
        if called == method and left[0]:
            left[0] -= 1
            act()
        return effect()

    return deliver


class Api(Protocol):
    """An API server whose calls a test delivers or loses. ``date`` is the server's clock."""

    deliver: Delivery
    date: Callable[[], datetime | None]

    @property
    def kube(self) -> Kube:
        """This test double, typed as our API client, which the code under test expects."""

    @property
    def objects(self) -> Mapping[str, Mapping[str, Any]]:
        """The stored objects by path."""

    def store(self, path: str, manifest: Mapping[str, Any]) -> bytes:
        """Create or overwrite an object without any check, and return it as stored."""

    def remove(self, path: str) -> None:
        """Remove an object, even if finalizers or policies protect it."""


class Handle:
    """A test double of our API client, without watches. Informers see changes only when a test lets them LIST."""

    @property
    def kube(self) -> Kube:
        return cast("Kube", self)

    def stream(
        self, path: str, params: Mapping[str, object] | None = None, *, connect_timeout: float = 10, read_timeout: float
    ) -> Never:
        """Fail every watch."""
        raise Unavailable(f"no watch of {path} with {params}, for {connect_timeout:g} s or for {read_timeout:g} s")


class ApiDouble(Handle):
    """Stores objects by path. Every namespace exists, even if no test created it.

    ``calls`` has the HTTP method of every call. A test may replace ``deliver`` to make calls fail.
    """

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.deliver: Delivery = delivered
        self.date: Callable[[], datetime | None] = lambda: None
        self._version = 100

    @property
    def version(self) -> str:
        """The newest resourceVersion."""
        return str(self._version)

    def forget_calls(self) -> None:
        self.calls.clear()

    def store(self, path: str, manifest: Mapping[str, Any]) -> bytes:
        self._version += 1
        stored = copy.deepcopy({**manifest})
        stored["metadata"] = {**stored.get("metadata", {}), "resourceVersion": str(self._version)}
        self.objects[path] = stored
        return json.dumps(stored).encode()

    def remove(self, path: str) -> None:
        self._version += 1
        del self.objects[path]

    def backup(self) -> Callable[[], None]:
        """Return a function that later restores the present objects and resourceVersion, like a backup of etcd."""
        objects, version = copy.deepcopy(self.objects), self._version

        def restore() -> None:
            self.objects, self._version = copy.deepcopy(objects), version

        return restore

    def get(self, path: str, _params: object = None, timeout: float = 10) -> bytes:
        return self._call("GET", timeout, lambda: json.dumps(self._known(path)).encode())

    def get_heard(self, path: str, timeout: float = 10) -> Heard:
        return Heard(self.get(path, timeout=timeout), date=self.date())

    def post_heard(self, path: str, body: bytes, _params: object = None, timeout: float = 10) -> Heard:
        return Heard(self.post(path, body, timeout=timeout))

    def put_heard(self, path: str, body: bytes, _params: object = None, timeout: float = 10) -> Heard:
        dates: list[datetime | None] = []
        return Heard(self.put(path, body, timeout=timeout, on_done=lambda: dates.append(self.date())), date=dates[0])

    def post(self, path: str, body: bytes, _params: object = None, timeout: float = 10) -> bytes:
        manifest = json.loads(body)

        def effect() -> bytes:
            if path.endswith("/binding"):
                return self._bind(path.removesuffix("/binding"), manifest)
            own = f"{path}/{manifest['metadata']['name']}"
            if own in self.objects:
                raise Conflict(409, "already exists")
            return self.store(own, manifest)

        return self._call("POST", timeout, effect)

    def put(
        self,
        path: str,
        body: bytes,
        _params: object = None,
        timeout: float = 10,
        *,
        on_done: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Replace an object. ``on_done`` is called after the replacement, even if the answer is lost or late."""
        manifest = json.loads(body)

        def effect() -> bytes:
            known = self._known(path)["metadata"]
            if known["resourceVersion"] != manifest["metadata"]["resourceVersion"]:
                raise Conflict(409, "the object has been modified")
            kept = {key: known[key] for key in ("deletionTimestamp",) if key in known}
            on_done()
            return self.store(path, {**manifest, "metadata": {**manifest["metadata"], **kept}})

        return self._call("PUT", timeout, effect)

    def patch(self, path: str, body: bytes, content_type: str, _params: object = None, *, timeout: float = 10) -> bytes:
        """Apply a merge patch (RFC 7396) or JSON Patch (RFC 6902). Raises Conflict if its resourceVersion is old."""
        patch = json.loads(body)
        patched = _patched if content_type == JSON_PATCH else _merged

        def effect() -> bytes:
            known = self._known(path)
            changed = patched(known, patch)
            if any(changed["metadata"].get(key) != known["metadata"].get(key) for key in ("uid", "resourceVersion")):
                raise Conflict(409, "the object has been modified")
            stored = self.store(path, changed)
            if changed["metadata"].get("deletionTimestamp") and not changed["metadata"].get("finalizers"):
                self.remove(path)
            return stored

        return self._call("PATCH", timeout, effect)

    def delete(self, path: str, body: bytes | None = None, _params: object = None, timeout: float = 10) -> bytes:
        """Delete an object. An object with finalizers is removed when a patch removes the last finalizer."""
        wanted = json.loads(body or b"{}").get("preconditions", {}).get("resourceVersion")

        def effect() -> bytes:
            known = self._known(path)
            if wanted not in (None, known["metadata"]["resourceVersion"]):
                raise Conflict(409, "Precondition failed")
            if known["metadata"].get("finalizers"):
                return self.store(path, {**known, "metadata": {**known["metadata"], "deletionTimestamp": "2026-01-01"}})
            self.remove(path)
            return json.dumps(known).encode()

        return self._call("DELETE", timeout, effect)

    def list_pages(
        self, path: str, params: Params | None = None, _limit: int = 500, timeout: float = 30, **_bounds: object
    ) -> Iterator[Page]:
        """Yield all matching objects as one page. Supports labelSelector, and fieldSelector by name, phase, reason."""
        selector = str((params or {}).get("labelSelector", ""))
        field, _, value = str((params or {}).get("fieldSelector", "")).partition("=")
        part, name = field.split(".") if field in ("metadata.name", "status.phase") else ("metadata", "")

        def effect() -> bytes:
            found = [stored for own, stored in self.objects.items() if path in _collections_of(own)]
            return json.dumps(
                [
                    each
                    for each in found
                    if _selects(selector, each)
                    and (not name or each.get(part, {}).get(name) == value)
                    and (field != "reason" or each.get("reason", value) == value)
                ]
            ).encode()

        items = msgspec.json.decode(self._call("LIST", timeout, effect), type=list[msgspec.Raw])
        yield Page(str(self._version), items)

    def _bind(self, path: str, binding: dict[str, Any]) -> bytes:
        known, asked = self._known(path), binding["metadata"]
        metadata, spec = known["metadata"], known["spec"]
        if spec.get("nodeName"):
            raise Conflict(409, f"pod {metadata['name']} is already assigned to node {spec['nodeName']}")
        if any(asked.get(key) not in (None, metadata[key]) for key in ("uid", "resourceVersion")):
            raise Conflict(409, "Precondition failed")
        annotations = {**metadata.get("annotations", {}), **asked.get("annotations", {})}
        bound = {**known, "metadata": {**metadata, "annotations": annotations}}
        self.store(path, {**bound, "spec": {**spec, "nodeName": binding["target"]["name"]}})
        return b'{"kind": "Status", "status": "Success"}'

    def _known(self, path: str) -> dict[str, Any]:
        namespace = re.fullmatch("/api/v1/namespaces/([^/]+)", path)
        if namespace and path not in self.objects:
            return {"metadata": {"name": namespace[1], "uid": f"uid-of-{namespace[1]}"}}
        if path not in self.objects:
            raise NotFound(404, f"{path} not found")
        return self.objects[path]

    def _call(self, method: str, timeout: float, effect: Effect) -> bytes:
        self.calls.append(method)
        return self.deliver(method, timeout, effect)


def _merged(target: object, patch: object) -> Any:
    if not isinstance(patch, dict):
        return patch
    kept = {**target} if isinstance(target, dict) else {}
    changed = {key: _merged(kept.get(key), value) for key, value in patch.items() if value is not None}
    return {**{key: value for key, value in kept.items() if key not in patch}, **changed}


def _patched(target: dict[str, Any], patch: Any) -> dict[str, Any]:
    """Return the target after a JSON Patch. A patch that does not apply raises a 422, as a real API server does."""
    try:
        changed: dict[str, Any] = jsonpatch.apply_patch(target, patch)
    except (jsonpatch.JsonPatchException, JsonPointerException) as error:
        raise ApiError(422, f"the server rejected our request due to an error in our request: {error}") from error
    return changed


def _selects(selector: str, stored: dict[str, Any]) -> bool:
    labels = stored["metadata"].get("labels") or {}
    wanted = (each.partition("=") for each in selector.split(",") if each)
    return all(
        key[1:] not in labels if key.startswith("!") else key in labels and value in ("", labels[key])
        for key, _, value in wanted
    )


def _collections_of(path: str) -> tuple[str, str]:
    """Return the paths of two collections that have the object: in its namespace, and in all namespaces."""
    collection = path.rpartition("/")[0]
    return collection, re.sub("/namespaces/[^/]+/", "/", collection)


class Script:
    """Deliver each call of the given HTTP methods by the next of the given functions. Deliver other calls unchanged."""

    def __init__(self, *deliveries: Delivery, methods: tuple[str, ...] = ("PUT", "POST")) -> None:
        self._left = list(deliveries)
        self._methods = methods

    def __call__(self, method: str, timeout: float, effect: Effect) -> bytes:
        if method not in self._methods or not self._left:
            return effect()
        return self._left.pop(0)(method, timeout, effect)


class Late:
    """A delivery that delays calls. The sender gets a timeout, and the API server gets the call only by `land`."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []

    def __call__(self, _method: str, _timeout: float, effect: Effect) -> bytes:
        self._effects.append(effect)
        raise Unavailable("timed out")

    def land(self) -> None:
        """Deliver the delayed calls. Errors are ignored, because the senders no longer wait for an answer."""
        effects, self._effects = self._effects, []
        for effect in effects:
            try:
                effect()
            except VcudaError:
                continue


def preceded_by(act: Callable[[], object]) -> Delivery:
    def deliver(_method: str, _timeout: float, effect: Effect) -> bytes:
        act()
        return effect()

    return deliver
