"""Starts a server program, waits until it is ready, and stops it. The server never outlives this process."""

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
    """Raised if a server ends before it is ready, or is not ready in time. The message has the end of its log file."""


@dataclass
class Component:
    """A server that ``command`` starts."""

    name: str
    command: tuple[str, ...]
    log: Path
    """The file to which the output of the server is appended, also after a restart."""
    ready: Callable[[], bool]
    """Returns true if the server is ready."""
    timeout: float
    """The maximum number of seconds from a start of the server until it is ready."""
    env: Mapping[str, str] | None = None
    """The environment of the server; None for the environment of this process."""
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id of the server. Raises RuntimeError if the server was never started."""
        return self._handle().pid

    def launch(self) -> None:
        """Start the server and return before it is ready. The caller must then call ``await_ready``.

        Only the main thread may call this method. The kernel kills the server when the thread that started the server
        ends (PR_SET_PDEATHSIG in prctl(2)). So if this process is killed, its servers end too.
        """
        if self.running:
            raise RuntimeError(f"{self.name} is already running")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{self.name} must be started by the main thread, because it ends with its thread")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", "--", *self.command),  # noqa: S607  # setpriv is in util-linux
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C signals the foreground processes of the terminal. The server gets a session of its own, and so
                # does not get this signal. Only this process does, and stops all servers in order.
                start_new_session=True,
            )

    def await_ready(self) -> None:
        """Wait until the server is ready. Raises StartupError if it ends or is not ready in ``timeout`` seconds."""
        deadline = time.monotonic() + self.timeout
        while not self.ready():
            if not self._ended_within(POLL_SECONDS) and time.monotonic() < deadline:
                continue
            raise StartupError(self.failure(f"{self.name} was not ready after {self.timeout:g} s"))

    def failure(self, problem: str = "") -> str:
        """Return a message with the problem and the end of the server's log.

        ``problem``: a sentence without its full stop. If the server has ended, the message has the server's exit status
        instead of this sentence.
        """
        text = problem if self.running else f"{self.name} ended with exit status {self._handle().returncode}"
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        return f"{text}. Its log {self.log} ends with:\n{tail}"

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def kill(self) -> None:
        """Kill the server to simulate a crash, and wait until it has ended. ``start`` restarts it with its data."""
        self._handle().kill()
        self._handle().wait()

    def stop(self, grace: float = 10) -> None:
        """Stop the server and wait until it has ended. After ``grace`` seconds, the server is killed."""
        if not self.running:
            return
        self._handle().send_signal(signal.SIGTERM)
        if not self._ended_within(grace):
            self.kill()

    @contextmanager
    def started(self) -> Iterator["Component"]:
        """Return a context in which the server runs and is ready. The server is stopped at the end of the context."""
        try:
            self.start()
            yield self
        finally:
            self.stop()

    @contextmanager
    def away(self, end: Callable[[], None] | None = None) -> Iterator[None]:
        """Return a context in which the server is stopped. ``end`` stops it (default: `stop`). Then it starts again."""
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
    """A callable that returns true if a GET of ``path`` at ``port`` of ``address`` is answered with 200.

    With ``ca_file``, the GET uses TLS.
    """

    port: int
    path: str
    ca_file: Path | None = None
    token: str = ""
    address: str = "127.0.0.1"

    def __call__(self) -> bool:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", self.path, headers=headers)
                return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):  # The server is not ready yet.
            return False

    def _connection(self) -> http.client.HTTPConnection:
        if self.ca_file is None:
            return http.client.HTTPConnection(self.address, self.port, timeout=TIMEOUT_SECONDS)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection(self.address, self.port, timeout=TIMEOUT_SECONDS, context=context)
