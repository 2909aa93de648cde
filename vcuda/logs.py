"""Structured logs. Each line on standard output is one JSON object."""

import atexit
import datetime
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

import msgspec
import structlog

INTERVAL = 0.05
"""The seconds between two writes of collected log lines."""


def configure(level: str, logger_factory: Callable[..., object] | None = None) -> None:
    """Set up structlog for a process that writes each line immediately. ``level``: debug, info, warning or error."""
    structlog.configure(
        processors=[_render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=logger_factory or structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


def configure_batched(level: str) -> None:
    """Set up structlog for a server, in which a thread that logs a line does not wait until the line is written."""
    lines = BatchedLines(sys.stdout.buffer)
    atexit.register(lines.flush)
    # gunicorn forks its workers later. Each worker needs its own lock, and its own thread that writes lines.
    os.register_at_fork(after_in_child=lines.start_anew)
    configure(level, lambda *_: lines)


class BatchedLines:
    """A logger for structlog. Its own thread writes the collected lines every `INTERVAL`.

    A warning or an error is written immediately, after all earlier lines. A killed process loses its unwritten lines.
    """

    # A thread that writes a line releases the interpreter lock, and then waits to get the lock again. A thread that
    # answers a request must not wait. So another thread writes the lines.

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def info(self, line: bytes) -> None:
        """Collect a line. The logger's own thread writes the line within `INTERVAL`."""
        self._lines.append(line)
        if self._thread is None:
            self._start()

    debug = info

    def warning(self, line: bytes) -> None:
        """Write all collected lines and this line immediately."""
        self._lines.append(line)
        self.flush()

    error = critical = warning

    def flush(self) -> None:
        with self._writing:
            lines = []
            while self._lines:
                lines.append(self._lines.popleft())
            if lines:
                self._stream.write(b"\n".join(lines) + b"\n")
                self._stream.flush()

    def start_anew(self) -> None:
        # A forked process has only one thread, and inherits a lock that a thread of the parent process may hold. The
        # parent writes the lines collected before the fork. So the child drops its copies of these lines.
        self._lines.clear()
        self._writing = threading.Lock()
        self._thread = None

    def _start(self) -> None:
        with self._writing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self.flush()


def _render(_logger: object, method: str, event: structlog.typing.EventDict) -> bytes:
    # This function replaces structlog's default processors, because it is faster, and each admission is logged.
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(None, method, event)
    stamp = datetime.datetime.now(datetime.UTC).isoformat()
    return msgspec.json.encode({"timestamp": stamp, "level": method, **event}, enc_hook=repr)
