"""Opens watches of one resource path, and reads their events. Any thread can end an open watch."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import msgspec

from vcuda.errors import Unavailable, WatchLost
from vcuda.k8s_types import UNDECODABLE, Decoder
from vcuda.kube.client import Kube, Status, Stream, rejection
from vcuda.kube.connection import Params
from vcuda.shallow import shallow

T = TypeVar("T")


class Key(NamedTuple):
    """The namespace and name of an object. The namespace of a cluster-wide object, such as a node, is empty."""

    namespace: str
    name: str


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an object's metadata that a reflector needs."""

    resource_version: str
    namespace: str = ""
    name: str = ""
    uid: str = ""

    @property
    def key(self) -> Key:
        return Key(self.namespace, self.name)


class WatchEvent(NamedTuple):
    """One event of a watch. A BOOKMARK event has a version, but no object."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    meta: Meta
    raw: msgspec.Raw


class _ObjectHead(msgspec.Struct, frozen=True):
    metadata: Meta


class _EventLine(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


# Almost every line of a watch begins with one of these texts, because the API server writes ``type`` first.
_BEGINNINGS: Mapping[bytes, Literal["ADDED", "MODIFIED", "DELETED"]] = {
    b'{"type":"ADDED"': "ADDED",
    b'{"type":"MODIFIED"': "MODIFIED",
    b'{"type":"DELETED"': "DELETED",
}

_HEAD = msgspec.json.Decoder(_ObjectHead)
_NESTED_HEAD = Decoder(_ObjectHead)
_EVENT = msgspec.json.Decoder(_EventLine)
_STATUS = msgspec.json.Decoder(Status)


def read_meta(raw: bytes) -> Meta:
    """Return the metadata of one object in JSON. Raises one of ``UNDECODABLE`` if the metadata cannot be read."""
    return _NESTED_HEAD.decode(raw).metadata


def read_event(line: bytes, what: str) -> WatchEvent:
    """Return the event in a line of a watch. Raises the ApiError in the line, or WatchLost for an unreadable line.

    If the values of the object are nested too deep for msgspec, ``raw`` does not have the deepest values.
    """
    try:
        return _read_change(line) or _read_any(line, what)
    except UNDECODABLE:
        pass
    try:
        return _read_any(shallow(line), what)
    except UNDECODABLE as error:
        raise WatchLost(f"{what}: unreadable event: {error}") from error


def _read_change(line: bytes) -> WatchEvent | None:
    """Return the event of a line that begins with one of `_BEGINNINGS`; None for other lines. This is faster than
    `_read_any`, which searches the JSON for the end of the object."""
    beginning, _, rest = line.partition(b',"object":')
    if (kind := _BEGINNINGS.get(beginning)) is None:
        return None
    raw = rest.removesuffix(b"}")
    try:
        # The decoder reads to the end of ``raw``, so it raises an error if other text follows the object.
        return WatchEvent(kind, _HEAD.decode(raw).metadata, msgspec.Raw(raw))
    except msgspec.MsgspecError:
        return None


def _read_any(line: bytes, what: str) -> WatchEvent:
    event = _EVENT.decode(line)
    if event.type == "ERROR":
        error = rejection(what, _STATUS.decode(event.object).code, event.object)
        raise WatchLost(str(error)) if isinstance(error, Unavailable) else error
    return WatchEvent(event.type, _HEAD.decode(event.object).metadata, event.object)


def until(stopping: threading.Event, items: Iterable[T]) -> Iterator[T]:
    remaining = iter(items)
    while not stopping.is_set():
        try:
            yield next(remaining)
        except StopIteration:
            return


@dataclass(eq=False)
class Watches:
    """Opens watches of one resource path, one after another. ``params`` are query parameters, for example selectors.

    A watch ends after ``silence`` seconds without an event. If ``stopping`` or ``interrupted`` is set before a watch is
    opened, the watch ends immediately. `abort` ends an open watch, so that no thread waits for the next event.
    """

    kube: Kube
    path: str
    params: Params
    silence: float
    stopping: threading.Event
    interrupted: threading.Event
    _stream: Stream | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def what(self) -> str:
        return f"WATCH {self.path}"

    @contextmanager
    def open(self, version: str, seconds: float) -> Iterator[Iterator[WatchEvent]]:
        """Open a watch for ``seconds``, and yield its events after ``version``, a resourceVersion.

        Raises the errors of `Kube.stream` and `read_event`.
        """
        fixed: Params = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": int(seconds)}
        params = {**self.params, **fixed, "resourceVersion": version}
        with self.kube.stream(self.path, params, read_timeout=self.silence) as stream:
            self._hold(stream)
            try:
                yield (read_event(line, self.what) for line in until(self.stopping, stream))
            finally:
                self._hold(None)

    def abort(self) -> None:
        """End the open watch, if there is one. Any thread may call this."""
        with self._lock:
            if self._stream is not None:
                self._stream.abort()

    def _hold(self, stream: Stream | None) -> None:
        with self._lock:
            self._stream = stream
            if stream is not None and (self.stopping.is_set() or self.interrupted.is_set()):
                stream.abort()
