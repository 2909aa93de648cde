"""Keeps all objects of one resource in memory. A LIST reads the objects, and then a watch delivers each change."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Generic, TypeVar

import structlog

from vcuda.errors import ApiError, VcudaError, WatchLost
from vcuda.kube import client, connection, store, watch

T = TypeVar("T")

OnEvent = Callable[[T | None, T | None], None]
"""A function that is called after an object changes, with the old and the new object. The old object is None if the
object was created. The new object is None if the object was deleted."""

_SERVER_TIMEOUT = 300  # the API server ends a watch after this many seconds ±20 %; new watches spread over all servers
SILENCE = 70
"""A watch without an event for this many seconds is opened again. The API server sends a bookmark about every 60 s. If
no bookmark arrives, the connection is dead, or the API server does not cache the resource (Events) and sends no
bookmarks for it. The charge of an admitted pod stays pending for longer than this time. So the watch delivers the
stored pod before that charge is released."""
_STANDING = 10  # seconds; a watch that lasts so long resets the back-off (the delay after failed attempts)
RELIST_SECONDS = 240.0
"""After this many seconds, an unfinished LIST in pages starts again, because etcd drops its version after 5 minutes."""

_MAX_DOUBLINGS = 32  # the ceiling of the delay is reached long before; endless doubling would overflow a float


@dataclass(slots=True)
class Backoff:
    """Random delays in seconds between failed attempts. Their upper bound doubles from ``first`` to ``ceiling``."""

    first: float = 0.1
    ceiling: float = 10.0
    draw: Callable[[], float] = random.random
    _steps: int = field(default=0, init=False)

    def next(self) -> float:
        """Return the delay before the next attempt, and double the upper bound of the delay after it."""
        step = min(self.ceiling, math.ldexp(self.first, self._steps))
        self._steps = min(self._steps + 1, _MAX_DOUBLINGS)
        return step * (0.5 + self.draw() / 2)

    def reset(self) -> None:
        self._steps = 0


@dataclass(eq=False)
class Reflector(Generic[T]):
    """Keeps the objects under one resource path in a store. A thread updates the store by lists and watches.

    ``synced`` is set after the first list. After that, the store never returns to an older version, and ``on_event``
    gets every change. If the connection is lost, the store keeps its objects, and ``last_event_age`` grows.

    ``decode`` gets the raw JSON of one object, and returns None if the object must not be kept. If ``decode`` fails,
    the error is counted, logged once for the object, and the store keeps the last good value of the object. `unread`
    returns the objects whose newest state could not be decoded.

    ``on_event`` is called in the reflector's own thread, in order, after the store has changed. If ``on_event`` raises
    an exception, this is logged and counted, and the next event follows. ``on_listed`` is called after each list and
    its events. ``on_listing`` is called before each list, and returns True if ``decode`` has new rules. The list then
    decodes unchanged objects again. After an unexpected error, for example in these two callbacks, the error is logged
    and counted, and the reflector lists again after a delay. So ``alive`` is True until `stop` is called.

    ``listed_version`` is the version of the last list. It is set before the objects of that list are stored. The watch
    delivers every deletion after that version. An object that was created and deleted between the previous watch and
    the list was never delivered.

    ``params`` are query parameters, for example selectors. ``page_size`` is in objects. ``clock`` returns seconds.
    ``wait`` sleeps for the given seconds, and returns True if the reflector must stop.
    """

    # Like client-go's Reflector, this class lists, watches from the list's version, and lists again after a 410. The
    # list is read in pages, because a page is bounded in bytes. All its objects are stored in one step. The list
    # includes every change that the API server had confirmed before the list began.

    kube: client.Kube
    path: str
    decode: Callable[[bytes], T | None]
    _: KW_ONLY
    params: connection.Params = field(default_factory=dict)
    on_event: OnEvent[T] = lambda _old, _new: None
    on_listed: Callable[[], None] = lambda: None
    on_listing: Callable[[], bool] = lambda: False
    page_size: int = 500
    backoff: Backoff = field(default_factory=Backoff)
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], bool] | None = None

    def __post_init__(self) -> None:
        self.counts = store.ReflectorCounts()
        self.synced = threading.Event()
        self.listed_version = ""
        self._stopping = threading.Event()
        self._asked_again = threading.Event()
        self._wait = self.wait or self._stopping.wait
        self._watches = watch.Watches(self.kube, self.path, self.params, SILENCE, self._stopping, self._asked_again)
        self._log = structlog.get_logger().bind(resource=self.path)
        self._store: store.Store[T] = store.Store()
        self.get = self._store.get
        self.snapshot = self._store.snapshot
        self.versioned = self._store.versioned
        self.within = self._store.within
        self.namespaces = self._store.namespaces
        self.unread = self._store.unread
        self.check_read = self._store.check_read
        self._reader = store.ObjectReader(self.decode, self._store, self.counts, self._log)
        self._list_due = True
        self._last_event = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"reflector {self.path}", daemon=True)

    @property
    def resource_version(self) -> str:
        """The newest resourceVersion that the store of objects includes; empty before the first list."""
        return self._store.version

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def last_event_age(self, now: float) -> float:
        """Return the seconds between the API server's last answer and ``now``; infinite before the first list.

        Answers are lists, starts of watches, events and bookmarks. An age above 120 s means that the server is silent.
        """
        return now - self._last_event

    def start(self) -> None:
        """Start the reflector's thread. ``synced`` is set after the first list and its callbacks."""
        self._thread.start()

    def stop(self) -> None:
        """Make the reflector's thread end: immediately, or after the current page if it is reading a list in pages."""
        self._stopping.set()
        self._watches.abort()

    def list_again(self) -> None:
        """Make the reflector list all objects again. Any thread may call this method. An open watch ends immediately.
        If a list is running, the reflector finishes it, and then makes another list."""
        self._asked_again.set()
        self._watches.abort()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def _run(self) -> None:
        # Wait even after a successful watch. Otherwise the loop would flood a server that ends each watch immediately.
        while not self._stopping.is_set():
            self._attempt()
            if self._wait(self.backoff.next()):
                return

    def _attempt(self) -> None:
        # Lists the objects if a list is due, and then watches them. After a lost connection, no new list is needed.
        if self._asked_again.is_set():
            self._asked_again.clear()  # cleared first, so that a call of `list_again` during the list is not lost
            self._list_due = True
        try:
            if self._list_due:
                self.relist()
            if not self._stopping.is_set():
                with self._watches.open(self._store.version, self._duration()) as events:
                    self.follow(events)
        except VcudaError as error:
            if self._stopping.is_set() or self._asked_again.is_set():
                return  # `stop` or `list_again` ended the stream
            self.counts.failures += 1
            self._list_due = self._list_due or isinstance(error, ApiError | WatchLost)
            self._log.warning("watch failed", error=str(error), list_again=self._list_due)
        except Exception:  # noqa: BLE001  # without this thread, the stored objects would stay old until a restart
            self.counts.failures += 1
            self._list_due = True
            self._log.exception("watch failed by an unexpected error", list_again=True)

    def relist(self) -> None:
        """Replace the stored objects by a list that is read in pages."""
        # A LIST without a resourceVersion is as new as etcd, even if the API server answers it from its cache.
        kept: dict[watch.Key, store.StoreEntry[T]] = {}
        reader = replace(self._reader, unread={}, anew=self.on_listing())
        pages = self.kube.list_pages(
            self.path,
            self.params,
            self.page_size,
            seconds=RELIST_SECONDS,
            skip=lambda skipped: kept.update(reader.last_good(skipped)),
        )
        listing = store.from_pages(watch.until(self._stopping, pages), reader)
        if not self._stopping.is_set():
            self._replace(listing._replace(entries={**kept, **listing.entries}))

    def _replace(self, listing: store.Listing[T]) -> None:
        fresh, self.listed_version = listing.entries, listing.version
        before = self._store.swap(listing)
        self._list_due = False
        self._last_event = self.clock()
        self.counts.lists += 1
        self._log.info("listed", objects=len(fresh), resource_version=listing.version)
        for key, entry in before.items():
            if key not in fresh:
                self._notify(entry, None)
        for key, entry in fresh.items():
            self._notify(before.get(key), entry)
        self.on_listed()
        self.synced.set()

    def _duration(self) -> float:
        return _SERVER_TIMEOUT * (0.8 + 0.4 * self.backoff.draw())

    def follow(self, events: Iterable[watch.WatchEvent]) -> None:
        """Apply the events of a watch to the stored objects until the watch ends. A list must have been read before."""
        self.counts.watches += 1
        opened = self._last_event = self.clock()
        try:
            for event in events:
                self._apply(event)
                self._last_event = self.clock()
        finally:
            if self.clock() - opened >= _STANDING:
                self.backoff.reset()

    def _apply(self, event: watch.WatchEvent) -> None:
        version = event.meta.resource_version
        if event.type == "BOOKMARK":
            self._store.advance(version)
            return
        self.counts.events += 1
        key = event.meta.key
        old = self._store.entry(key)
        new = None if event.type == "DELETED" else self._reader.entry(event.meta, event.raw)
        if event.type == "DELETED":
            self._store.unread_objects.pop(key, None)
        self._store.put(key, new, version)
        self._notify(old, new)

    # If an object was deleted and created again between two watches, its uid differs. Then report both changes.
    def _notify(self, old: store.StoreEntry[T] | None, new: store.StoreEntry[T] | None) -> None:
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
        try:
            self.on_event(old, new)
        except Exception:  # noqa: BLE001  # if a callback fails, the stored objects are still correct
            self.counts.callback_errors += 1
            self._log.exception("callback failed")
