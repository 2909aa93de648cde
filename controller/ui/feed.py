"""The picture kept fresh while somebody looks, and what changed told to the browsers that listen.

Pictures are taken by whoever needs one, at most one a second, and nobody reads the leader's own structures besides. A
listener takes what it has missed when it is ready for it, so a slow one delays nobody; one that has missed too much
is told to load the page again.
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
"""Seconds between two pictures, at least."""

HEARTBEAT_SECONDS = 10.0
"""Seconds after which a listener that there is no news for hears that the connection stands."""

MAX_LISTENERS = 64
"""Each holds a thread of the server for as long as it stays."""

MAX_KEPT_CHANGES = 60
"""Changes that a listener may be late by."""


class TooManyListeners(Exception):
    """There are as many listeners as may be."""


class Feed:
    """Takes the pictures of one leader's source. ``clock`` is in seconds."""

    def __init__(
        self,
        source: snapshot.Source,
        views: page.Views,
        *,
        min_interval: float = MIN_INTERVAL_SECONDS,
        heartbeat: float = HEARTBEAT_SECONDS,
        most: int = MAX_LISTENERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.heartbeat = heartbeat
        self._views = views
        self._min_interval = min_interval
        self._most = most
        self._clock = clock
        # Versions of another leader, or of this one's last time of leading, must not be taken for ours.
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
        """Look for changes while there are listeners, in a thread of its own."""
        threading.Thread(target=self._run, name="page feed", daemon=True).start()

    def close(self) -> None:
        """End the thread, and every listener's stream."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def picture(self) -> snapshot.Picture:
        """Return a picture that is at most ``min_interval`` seconds old."""
        with self._taking:
            if self._picture is None or self._clock() >= self._taken + self._min_interval:
                self._picture = self._take(self._picture)
            return self._picture

    def listen(self, since: str, namespace: str) -> "Listener":
        """Return the stream of what changes after the version ``since``, for one who looks at ``namespace``.

        Raises TooManyListeners.
        """
        with self._changed:
            if self._looked_at.total() >= self._most:
                raise TooManyListeners
            self._looked_at[namespace] += 1
            self._changed.notify_all()
        return Listener(self, since, namespace)

    def leave(self, namespace: str) -> None:
        """Forget a listener."""
        with self._changed:
            self._looked_at[namespace] -= 1
            self._looked_at += Counter()  # drops those that nobody looks at any more

    def after(self, position: int) -> tuple[int, bytes] | None:
        """Return the number and the text of what is to be said after a position; None where there is no news for long.

        Raises EOFError when closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._number > position, self.heartbeat)
            if self._closed:
                raise EOFError
            if self._number <= position:
                return None
            # A browser behind a proxy that buffers may be minutes late; what it missed is not kept for ever.
            missed = [message for number, message in self._messages if number > position]
            if len(missed) < self._number - position:
                return self._number, _reset(f"{self._epoch}-{self._number}")
            return self._number, b"".join(missed)

    def position(self, version: str) -> int:
        """Return the position of a version; of one that is not known, such as another leader's, one before all."""
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
            except Exception:  # noqa: BLE001  # a fault of the page must not end with the leader; logged, and tried again
                self._log.exception("no picture")
            time.sleep(self._min_interval)

    def _take(self, before: snapshot.Picture | None) -> snapshot.Picture:
        # Where nothing is different the picture before stands, and with it its version: nobody is told anything.
        after = snapshot.take(self.source, self._views, before, f"{self._epoch}-{self._number + 1}")
        self._taken = self._clock()
        moved = self._moved()
        if before and not moved and snapshot.same(before, after):
            return before
        if before is None or snapshot.has_other_rows(before, after):
            self._tell(_reset(after.version))
        else:
            change = snapshot.change_of(before, after, self._views)
            self._tell(_message(msgspec.structs.replace(change, touched=tuple({*change.touched, *moved}))))
        return after

    def _moved(self) -> list[str]:
        # The namespaces that somebody looks at whose pods are others than last time: a pod that was bound changes no
        # figure of its namespace.
        with self._changed:
            names = [name for name in self._looked_at if name]
        pods: dict[str, Sequence[model.HolderRow]] = {name: tuple(self.source.pods(name)) for name in names}
        before, self._pods = self._pods, pods
        return [name for name in names if name in before and before[name] != pods[name]]

    def _tell(self, message: bytes) -> None:
        with self._changed:
            self._number += 1
            self._messages.append((self._number, message))
            self._changed.notify_all()


class Listener:
    """A stream of server-sent events, for one browser; ``close`` must be called."""

    def __init__(self, feed: Feed, since: str, namespace: str) -> None:
        self._feed = feed
        self._position = feed.position(since)
        self._namespace = namespace
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        """Yield what changes, and a heartbeat where nothing does."""
        yield b"retry: 2000\n\n"
        while self._open:
            try:
                news = self._feed.after(self._position)
            except EOFError:
                return
            self._position, text = news or (self._position, b"event: beat\ndata:\n\n")
            yield text

    def close(self) -> None:
        """Give the place free; a second time does nothing."""
        if self._open:
            self._open = False
            self._feed.leave(self._namespace)


def _message(change: snapshot.Change) -> bytes:
    # JSON has no line breaks, which would end the event and let a message write the next one.
    return b"id: %s\nevent: change\ndata: %s\n\n" % (change.version.encode(), msgspec.json.encode(change))


def _reset(version: str) -> bytes:
    return b"id: %s\nevent: reset\ndata: %s\n\n" % (version.encode(), version.encode())
