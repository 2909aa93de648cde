"""The usage page of one replica: it stands by, and shows the leader's figures once it is the leader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from controller.ui.app import Standing, create_app
from controller.ui.feed import Feed
from controller.ui.server import Server, serve
from controller.ui.source import Source
from controller.ui.views import Views


class UsagePage:
    """Serves the page. ``holder`` names who leads, as far as this replica has seen; it may be empty."""

    def __init__(self, holder: Callable[[], str]) -> None:
        self._holder = holder
        self._views = Views()
        self._feed: Feed | None = None
        self._ready: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    def serve(self, address: tuple[str, int]) -> Server:
        """Serve on HOST:PORT. Raises OSError where it cannot be had."""
        return serve(address, create_app(self.standing, self._views))

    def show(self, source: Source, ready: Callable[[], bool]) -> None:
        """Show this source from now on, as soon as it is ``ready``."""
        with self._lock:
            self._ready = ready
            self._feed = Feed(source, self._views)
            self._feed.start()

    def close(self) -> None:
        """Show nothing any more, and end every listener's stream."""
        with self._lock:
            feed, self._feed = self._feed, None
        if feed:
            feed.close()

    def standing(self) -> Standing:
        """Return the feed of a leader that has seen everything, else why there is none."""
        with self._lock:
            feed, ready = self._feed, self._ready
        if feed is None:
            return Standing(None, standby_reason(self._holder()))
        if not ready():
            return Standing(None, "This controller leads since a moment ago, and is reading the cluster.")
        return Standing(feed, "")


def standby_reason(holder: str) -> str:
    """Say who leads."""
    if not holder:
        return "This controller stands by, and nobody leads at the moment."
    return f"This controller stands by: {holder} leads."
