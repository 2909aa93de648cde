"""Reads the data of the usage page while browsers show the page, and sends the changes to the browsers.

A *picture* is a copy of all data of the page at one time. If the last picture is more than a second old, a thread that
needs the data makes a new picture. A *listener* is the stream of changes to one browser. Each listener has its own
position in the list of changes, so a slow browser does not delay other browsers. Old changes are dropped from the list.
A browser that has missed such a change reloads the page.
"""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import structlog

from controller.ui import model, page, snapshot

MIN_INTERVAL_SECONDS = 1.0
"""The minimum number of seconds between two pictures (copies of all data of the usage page)."""

HEARTBEAT_SECONDS = 10.0
"""If nothing on the usage page has changed for this many seconds, each browser gets a heartbeat event."""

MAX_LISTENERS = 64
"""The maximum number of browsers that may wait for changes of the page. Each browser occupies a server thread."""

MAX_KEPT_CHANGES = 60
"""The maximum number of changes of the usage page that are kept in memory for slow browsers."""


class TooManyListeners(Exception):
    """A browser requests the stream of changes, but `MAX_LISTENERS` browsers already receive this stream."""


class Feed:
    """Reads the usage page's data from ``source``, and keeps the changes for browsers. ``clock``: returns seconds."""

    def __init__(
        self,
        source: snapshot.Source,
        views: page.Views,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self._views = views
        self._clock = clock
        # The version of each change begins with this random text. So this `Feed` recognizes a version that was created
        # by another leader or by an earlier `Feed` object.
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._taking = threading.Lock()
        self._picture: snapshot.Picture | None = None
        self._taken = 0.0
        self._pods: dict[str, Sequence[model.HolderRow]] = {}
        self._changed = threading.Condition()
        self._messages: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT_CHANGES)
        self._looked_at: Counter[str] = Counter()
        self._closed = False
        self._log = structlog.get_logger()

    def start(self) -> None:
        threading.Thread(target=self._run, name="page feed", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def picture(self) -> snapshot.Picture:
        """Return a picture (copy of all data of the usage page) that is at most `MIN_INTERVAL_SECONDS` old."""
        with self._taking:
            if self._picture is None or self._clock() >= self._taken + MIN_INTERVAL_SECONDS:
                self._picture = self._take(self._picture)
            return self._picture

    def listen(self, since: str, namespace: str) -> "Listener":
        """Return the stream of all changes after version ``since`` for one browser.

        ``namespace``: the namespace whose page the browser shows; empty for the overview.

        Raises TooManyListeners.
        """
        with self._changed:
            if self._looked_at.total() >= MAX_LISTENERS:
                raise TooManyListeners
            self._looked_at[namespace] += 1
            self._changed.notify_all()
        return Listener(self, since, namespace)

    def leave(self, namespace: str) -> None:
        with self._changed:
            self._looked_at[namespace] -= 1
            self._looked_at += Counter()  # The addition of an empty Counter removes namespaces with a count of 0.

    @property
    def updated(self) -> str:
        """The time (RFC 3339) at which the data of the usage page was last read; empty if it was never read."""
        return self._picture.updated if self._picture else ""

    def after(self, position: int) -> tuple[int, bytes] | None:
        """Wait for changes after ``position``. Return a pair: the position of the last change, and the new messages.

        Return None if nothing changes within `HEARTBEAT_SECONDS`. Raises EOFError when the feed is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > position, HEARTBEAT_SECONDS)
            if self._closed:
                raise EOFError
            if self._number <= position:
                return None
            # A browser behind a buffering proxy may be minutes late. If it has missed changes that are no longer kept,
            # the event `reset` makes the browser reload the page.
            missed = [message for number, message in self._messages if number > position]
            if len(missed) < self._number - position:
                return self._number, _reset(f"{self._epoch}-{self._number}")
            return self._number, b"".join(missed)

    def position(self, version: str) -> int:
        """Return the number of the change that has this version; -1 if it is unknown or from another leader."""
        epoch, _, number = version.partition("-")
        known = epoch == self._epoch and number.isdecimal() and len(number) < len(str(2**53))
        return int(number) if known and int(number) <= self._number else -1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._looked_at.total())
                if self._closed:
                    return
            try:
                self.picture()
            except Exception:  # noqa: BLE001  # An error of the page must not end the leader, so it is only logged.
                self._log.exception("the usage page could not be updated")
            time.sleep(MIN_INTERVAL_SECONDS)

    def _take(self, before: snapshot.Picture | None) -> snapshot.Picture:
        # If nothing on the page has changed, keep the version of the last picture, and send browsers only heartbeats.
        after = snapshot.take(self.source, self._views, before, f"{self._epoch}-{self._number + 1}")
        self._taken = self._clock()
        moved = self._moved()
        if before and not moved and snapshot.same(before, after):
            return msgspec.structs.replace(before, updated=after.updated)
        if before is None or snapshot.has_other_rows(before, after):
            self._send(_reset(after.version))
        else:
            change = snapshot.change_of(before, after, self._views)
            change = msgspec.structs.replace(change, touched=tuple({*change.touched, *moved}))
            self._send(_event("change", msgspec.json.encode(change), change.version))
        return after

    def _moved(self) -> list[str]:
        """Return the namespaces whose page a browser shows, and whose pods have changed since the last call.

        A pod can change while the usage of its namespace stays the same, for example when the pod is bound to a node.
        """
        with self._changed:
            names = [name for name in self._looked_at if name]
        pods: dict[str, Sequence[model.HolderRow]] = {name: tuple(self.source.pods(name)) for name in names}
        before, self._pods = self._pods, pods
        return [name for name in names if name in before and before[name] != pods[name]]

    def _send(self, message: bytes) -> None:
        with self._changed:
            self._number += 1
            self._messages.append((self._number, message))
            self._changed.notify_all()


class Listener:
    """The stream of server-sent events to one browser. The server must call ``close`` when the browser disconnects."""

    def __init__(self, feed: Feed, since: str, namespace: str) -> None:
        self._feed = feed
        self._position = feed.position(since)
        self._namespace = namespace
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        yield b"retry: 2000\n\n"
        while self._open:
            try:
                news = self._feed.after(self._position)
            except EOFError:
                return
            self._position, text = news or (self._position, _event("beat", self._feed.updated.encode()))
            yield text

    def close(self) -> None:
        """End the stream of changes, so that the browser no longer counts as a listener. Repeated calls do nothing."""
        if self._open:
            self._open = False
            self._feed.leave(self._namespace)


def _event(name: str, data: bytes, version: str = "") -> bytes:
    """Return a server-sent event.

    ``data``: must have no line break, like encoded JSON. After a line break, a tenant's text could forge another event.
    """
    head = f"id: {version}\n" if version else ""
    return b"%sevent: %s\ndata: %s\n\n" % (head.encode(), name.encode(), data)


def _reset(version: str) -> bytes:
    """Return the event that makes a browser reload the page."""
    return _event("reset", version.encode(), version)
