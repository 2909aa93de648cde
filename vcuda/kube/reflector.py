"""A resource kept in memory: LIST, then WATCH from there, for ever, without a gap."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec
import structlog

from vcuda.errors import ApiError, Unreachable, VcudaError
from vcuda.kube.backoff import Backoff
from vcuda.kube.client import Kube, Params, Status, refusal
from vcuda.kube.stream import Stream
from vcuda.kube.view import Entry, Key, View

T = TypeVar("T")

OnEvent = Callable[[T | None, T | None], None]
"""Called with the object before and after: (None, new) is an arrival, (old, None) a departure."""

_SERVER_TIMEOUT = 300  # seconds, ±20 %: the server ends a watch, so that clients spread over its replicas again
# Seconds. Bookmarks come about every 60 s, so after this the connection is dead, or the server is one of up to 1.20,
# which sends none for a resource that has not changed since it started. Watching anew serves both.
_SILENCE = 90
_STANDING = 10  # seconds; a watch that has stood so long ends the row of failures before it


@dataclass(slots=True)
class Counts:
    """What happened since the start, for a caller to publish as counters."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    failures: int = 0
    undecodable: int = 0
    callback_errors: int = 0


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    namespace: str = ""
    name: str = ""
    uid: str = ""


class _Head(msgspec.Struct, frozen=True):
    metadata: _Meta


class _Event(msgspec.Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


_HEAD = msgspec.json.Decoder(_Head)
_EVENT = msgspec.json.Decoder(_Event)
_STATUS = msgspec.json.Decoder(Status)


class Reflector(Generic[T]):
    """The objects under one resource path, each decoded by ``decode``, as new as the watch has brought them.

    It works as client-go's Reflector does: LIST, WATCH from the list's resourceVersion, LIST again after 410.
    Once ``synced`` the view only moves forward, and every change reaches ``on_event``. Where the connection is lost
    the view stays and ages (``last_event_age``); it is never emptied.

    ``decode`` gets the raw JSON of one object and returns None for one that is not kept. One that it cannot decode
    costs only itself: logged, counted, and its last good value, if the object had one, stays.

    ``on_event`` is called in the reflector's own thread, in order, after the view has changed. If it raises, that is
    logged with its traceback and counted in ``counts.callback_errors``, and the next event follows: the view is right
    all the same, and a thread that ends would freeze it for everybody. A fault in the reflector itself ends the
    thread, loudly; ``alive`` tells a health check.

    Objects are keyed by namespace and name. One that was deleted and made again under its name while nobody watched
    has another uid: that is reported as a departure and an arrival, never as a change.

    ``params`` hold selectors; ``page_size`` is in objects. ``clock`` is in seconds; ``wait`` sleeps for seconds and
    returns True when it is time to stop.
    """

    def __init__(
        self,
        kube: Kube,
        path: str,
        decode: Callable[[bytes], T | None],
        *,
        params: Params | None = None,
        on_event: OnEvent[T] | None = None,
        page_size: int = 500,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
        log: structlog.typing.FilteringBoundLogger | None = None,
    ) -> None:
        self.counts = Counts()
        self.synced = threading.Event()
        self._kube = kube
        self._path = path
        self._decode = decode
        self._params = dict(params or {})
        self._on_event = on_event
        self._page_size = page_size
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._stopping = threading.Event()
        self._wait = wait or self._stopping.wait
        self._log = (log or structlog.get_logger()).bind(resource=path)
        self._view: View[T] = View()
        self._list_due = True
        self._last_event = -math.inf
        self._stream: Stream | None = None
        self._stream_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"reflector {path}", daemon=True)

    @property
    def resource_version(self) -> str:
        """The newest version that the view includes; empty before the first LIST.

        To know that a snapshot is at least this new, read this first and the snapshot after it.
        """
        return self._view.version

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def get(self, key: tuple[str, str]) -> T | None:
        """Return the object under (namespace, name), or None."""
        entry = self._view.entry(Key(*key))
        return None if entry is None else entry.value

    def snapshot(self) -> Mapping[Key, T]:
        """Return all objects in a mapping that never changes; the same one until something does."""
        return self._view.snapshot()

    def last_event_age(self, now: float) -> float:
        """Return the seconds to ``now``, on ``clock``, from the last list, start of a watch, event or bookmark.

        Infinite before the first. Over 120 while running means that the API server is not heard.
        """
        return now - self._last_event

    def start(self) -> None:
        """Start the thread; ``synced`` is set after the first LIST and its callbacks."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end: a watch or a wait ends at once, a LIST in flight with its page."""
        self._stopping.set()
        with self._stream_lock:
            if self._stream is not None:
                self._stream.abort()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most ``timeout`` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        """Try, and wait, for ever. It waits after success too: a server that ends each watch at once meets no storm."""
        try:
            while not self._stopping.is_set():
                self._attempt()
                if self._wait(self._backoff.next()):
                    return
        except BaseException:
            self._log.exception("reflector ended by a fault of its own")
            raise

    def _attempt(self) -> None:
        """List if due, and watch. A watch broken in transit goes on from its version; after all else, list again."""
        try:
            if self._list_due:
                self._relist()
            if not self._stopping.is_set():
                self._watch()
        except VcudaError as error:
            if self._stopping.is_set():
                return  # the error is our own doing: stop() ended the stream
            self.counts.failures += 1
            self._list_due = self._list_due or isinstance(error, ApiError)
            self._log.warning("watch failed", error=str(error), list_again=self._list_due)

    def _relist(self) -> None:
        """Read everything and change over in one step. A LIST without resourceVersion is consistent: never older."""
        version = ""
        fresh: dict[Key, Entry[T]] = {}
        for page in self._kube.list_pages(self._path, self._params, self._page_size):
            version = version or page.resource_version
            fresh.update(self._read(page.items))
            if self._stopping.is_set():
                return
        before = self._view.swap(fresh, version)
        self._list_due = False
        self._last_event = self._clock()
        self.counts.lists += 1
        self._log.info("listed", objects=len(fresh), resource_version=version)
        for key, entry in before.items():
            if key not in fresh:
                self._notify(entry, None)
        for key, entry in fresh.items():
            self._notify(before.get(key), entry)
        self.synced.set()

    def _read(self, items: Iterable[msgspec.Raw]) -> Iterable[tuple[Key, Entry[T]]]:
        for raw in items:
            try:
                meta = _HEAD.decode(raw).metadata
            except msgspec.MsgspecError as error:
                self.counts.undecodable += 1
                self._log.error("object without readable metadata", error=str(error))
                continue
            key = Key(meta.namespace, meta.name)
            entry = self._entry(key, meta, raw)
            if entry is not None:
                yield key, entry

    def _watch(self) -> None:
        params = {
            **self._params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._view.version,
            "timeoutSeconds": int(_SERVER_TIMEOUT * (0.8 + 0.4 * self._backoff.draw())),
        }
        with self._kube.stream(self._path, params, read_timeout=_SILENCE) as stream:
            self.counts.watches += 1
            opened = self._last_event = self._clock()
            self._hold(stream)
            try:
                self._follow(stream)
            finally:
                self._hold(None)
                if self._clock() - opened >= _STANDING:
                    self._backoff.reset()

    def _hold(self, stream: Stream | None) -> None:
        with self._stream_lock:
            self._stream = stream
            if stream is not None and self._stopping.is_set():
                stream.abort()

    def _follow(self, stream: Stream) -> None:
        for line in stream:
            if self._stopping.is_set():
                return
            self._take(line)
            self._last_event = self._clock()

    def _take(self, line: bytes) -> None:
        """Apply one event. One that cannot be read could be any object's: only a LIST tells what it was."""
        try:
            event = _EVENT.decode(line)
            if event.type == "ERROR":
                self._list_due = True
                raise refusal(f"WATCH {self._path}", _STATUS.decode(event.object).code, event.object)
            meta = _HEAD.decode(event.object).metadata
        except msgspec.MsgspecError as error:
            self._list_due = True
            raise Unreachable(f"WATCH {self._path}: unreadable event: {error}") from error
        if event.type == "BOOKMARK":
            self._view.advance(meta.resource_version)
            return
        self.counts.events += 1
        key = Key(meta.namespace, meta.name)
        old = self._view.entry(key)
        new = None if event.type == "DELETED" else self._entry(key, meta, event.object)
        self._view.put(key, new, meta.resource_version)
        self._notify(old, new)

    def _entry(self, key: Key, meta: _Meta, raw: bytes) -> Entry[T] | None:
        """Decode an object, unless the view has this very version of it; None when it is not kept."""
        old = self._view.entry(key)
        last_good = old if old is not None and old.uid == meta.uid else None
        if last_good is not None and last_good.version == meta.resource_version:
            return last_good
        try:
            value = self._decode(raw)
        except Exception:  # noqa: BLE001  # whatever a decoder raises costs this object alone; logged and counted
            self.counts.undecodable += 1
            self._log.exception("undecodable object", namespace=key.namespace, name=key.name)
            return last_good
        return None if value is None else Entry(meta.uid, meta.resource_version, value)

    def _notify(self, old: Entry[T] | None, new: Entry[T] | None) -> None:
        if old is new:
            return
        if old is not None and new is not None and old.uid == new.uid:
            self._call(old.value, new.value)
            return
        if old is not None:
            self._call(old.value, None)
        if new is not None:
            self._call(None, new.value)

    def _call(self, old: T | None, new: T | None) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(old, new)
        except Exception:  # noqa: BLE001  # the class docstring says why the thread goes on; logged and counted
            self.counts.callback_errors += 1
            self._log.exception("callback failed")
