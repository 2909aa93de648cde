"""A server that this process starts, awaits and stops, and that ends together with this process."""

import http.client
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

LOG_TAIL_LINES = 30
POLL_SECONDS = 0.05


class StartupError(Exception):
    """A component ended, or was not ready in time. The message has the end of its log."""


@dataclass
class Component:
    """A server started by ``command``. It is ready when ``ready`` returns true.

    ``log`` receives its output over all restarts. ``timeout`` is the maximum time of a start in seconds. ``env`` is its
    environment; None for that of this process.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], bool]
    timeout: float
    env: Mapping[str, str] | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id. Raises RuntimeError if the server does not run."""
        return self._handle().pid

    def launch(self) -> None:
        """Start the process and return at once. The caller then calls ``await_ready``.

        Only the main thread may call this: the kernel ends the process when the thread that started it ends, so that a
        killed run leaves no processes behind (PR_SET_PDEATHSIG in prctl(2)).
        """
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"start {self.name} from the main thread: it would end together with any other")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", "--", *self.command),  # noqa: S607  # in util-linux: on every Linux
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only this process, whose teardown then stops the server in order
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Return when the server is ready. Raises StartupError if it ends before, or takes longer than ``timeout``."""
        deadline = time.monotonic() + self.timeout
        while not self.ready():
            if not self._ended_within(POLL_SECONDS) and time.monotonic() < deadline:
                continue
            raise StartupError(self.failure(f"not ready after {self.timeout:g} s"))

    def failure(self, what: str = "") -> str:
        """Return a message with the exit status, or ``what`` while the process runs, and with the end of the log."""
        what = what if self.running else f"exit status {self._handle().returncode}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return f"{self.name}: {what}; the end of {self.log}:\n{tail}"

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def kill(self) -> None:
        """Send SIGKILL, like a crash, and wait for the end. ``start`` restarts it with the same port and data."""
        self._handle().kill()
        self._handle().wait()

    def stop(self, grace: float = 10) -> None:
        """Send SIGTERM, and SIGKILL after ``grace`` seconds, and wait for the end. A stopped server returns at once."""
        if not self.running:
            return
        self._handle().send_signal(signal.SIGTERM)
        if not self._ended_within(grace):
            self.kill()

    @contextmanager
    def started(self) -> Iterator["Component"]:
        """Run the server during the ``with`` statement: it is ready inside, and has ended after it."""
        try:
            self.start()
            yield self
        finally:
            self.stop()

    @contextmanager
    def away(self, end: Callable[[], None] | None = None) -> Iterator[None]:
        """Keep the server stopped during the ``with`` statement. ``end`` stops it; by default `stop`."""
        (end or self.stop)()
        try:
            yield
        finally:
            self.start()

    def _handle(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process

    def _ended_within(self, seconds: float) -> bool:
        try:
            self._handle().wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


TIMEOUT_SECONDS = 2


@dataclass(frozen=True)
class Probe:
    """A callable that returns true if GET ``path`` on ``port`` of 127.0.0.1 answers 200; over TLS with a
    ``ca_file``.
    """

    port: int
    path: str
    ca_file: Path | None = None
    token: str = ""

    def __call__(self) -> bool:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", self.path, headers=headers)
                return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):  # not ready yet
            return False

    def _connection(self) -> http.client.HTTPConnection:
        if self.ca_file is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS, context=context)
