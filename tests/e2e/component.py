"""One server process of the control plane: started, waited for, killed, and started again on the same flags."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

LOG_TAIL_LINES = 30
POLL_SECONDS = 0.05


class StartupError(Exception):
    """A component ended, or was not ready in time; the message holds the end of its log."""


@dataclass
class Component:
    """A server started as ``command``, that is ready once ``ready`` answers true.

    ``log`` receives standard output and error, over all restarts. ``timeout`` is how long a start may take, in seconds.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    ready: Callable[[], bool]
    timeout: float
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id; RuntimeError where it does not run."""
        return self._handle().pid

    def launch(self) -> None:
        """Start the process and return at once; follow with ``await_ready``.

        The kernel ends the process when the thread that started it does, so that a killed test run leaves nothing
        behind (PR_SET_PDEATHSIG in prctl(2)); hence only the main thread may call this.
        """
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"start {self.name} from the main thread: it would end together with any other")
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", "--", *self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the tests, whose teardown then stops this in order
            )

    def await_ready(self) -> None:
        """Return once it serves; StartupError where it ends first or takes longer than ``timeout``."""
        deadline = time.monotonic() + self.timeout
        while not self.ready():
            if not self._ended_within(POLL_SECONDS) and time.monotonic() < deadline:
                continue
            state = (
                f"not ready after {self.timeout:g} s" if self.running else f"exit status {self._handle().returncode}"
            )
            raise StartupError(f"{self.name}: {state}; the end of {self.log}:\n{self.log_tail()}")

    def start(self) -> None:
        """Start the process and return once it serves."""
        self.launch()
        self.await_ready()

    def kill(self) -> None:
        """SIGKILL, as a crash; returns once the process is gone. ``start`` brings it back on the same port and data."""
        self._handle().kill()
        self._handle().wait()

    def stop(self, grace: float = 10) -> None:
        """SIGTERM, and SIGKILL after ``grace`` seconds; returns once it is gone, at once where it does not run."""
        if not self.running:
            return
        self._handle().send_signal(signal.SIGTERM)
        if not self._ended_within(grace):
            self.kill()

    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

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
