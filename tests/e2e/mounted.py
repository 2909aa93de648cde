"""The kubelet's part in a rotation: a Secret in a directory, which follows it some time later, as in a pod's volume."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

from tests.e2e.rest import Json, Rest
from vcuda.tls import File, write_files

POLL_SECONDS = 0.1
MODES = {"tls.key": 0o600}


class Volume:
    """``directory`` holds the Secret at ``path`` as it was ``delay()`` seconds ago; a deleted one stays as it was.

    kubelet swaps the files of a volume in one step, and leaves them in place while their Secret does not exist.
    """

    def __init__(self, rest: Rest, path: str, directory: Path, delay: Callable[[], float]) -> None:
        self.directory = directory
        self._rest = rest
        self._path = path
        self._delay = delay
        self._seen = ""
        self._coming: list[tuple[float, Json]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    @contextmanager
    def following(self) -> Iterator[None]:
        """`with` this, the directory follows the Secret; it holds the present one from the start."""
        self._read(0)
        self._swap()
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._read(self._delay())
            self._swap()

    def _read(self, delay: float) -> None:
        answer = self._rest.send("GET", self._path)
        if answer.status == HTTPStatus.NOT_FOUND:
            return
        secret = answer.ok()
        if (version := secret["metadata"]["resourceVersion"]) != self._seen:
            self._seen = version
            self._coming.append((time.monotonic() + delay, secret.get("data") or {}))

    def _swap(self) -> None:
        due = [data for moment, data in self._coming if moment <= time.monotonic()]
        if due:
            files = [
                File(name, name, base64.b64decode(text), MODES.get(name, 0o644), None) for name, text in due[-1].items()
            ]
            write_files(self.directory, files)
            self._coming = [(moment, data) for moment, data in self._coming if moment > time.monotonic()]
