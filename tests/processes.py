"""Our own programs as processes: started, awaited by what they log, and ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

PATIENCE = 60.0
"""Seconds until a wait for something that should have come becomes an error."""

Fields = dict[str, Any]
"""One structured line of a log, or another JSON object."""


class Reply(NamedTuple):
    """One HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def decoded(self) -> Fields:
        """The body, which is a JSON object and says so."""
        assert self.headers["Content-Type"] == "application/json", self
        answer: Fields = json.loads(self.body)
        return answer

    def samples(self, name: str, labels: Mapping[str, str]) -> list[float]:
        """The values of the metrics in the body of this name that have these labels."""
        families = text_string_to_metric_families(self.body.decode())
        samples = [sample for family in families for sample in family.samples]
        return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


class Lines:
    """What a stream has brought so far, line by line, read by a thread of its own."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def so_far(self) -> list[str]:
        """The lines read until now."""
        with self._changed:
            return list(self._lines)

    def first(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first line wanted as soon as it is there; None where the stream ended without it."""

        def found() -> str | None:
            return next(filter(wanted, self._lines), None)

        with self._changed:
            if not self._changed.wait_for(lambda: found() or self._ended, PATIENCE):
                raise TimeoutError(f"not the line wanted, {PATIENCE:g} s long: {self._lines}")
            return found()

    def join(self) -> None:
        """Wait for the end of the stream."""
        self._thread.join(PATIENCE)


class OwnProcess:
    """A running program of ours, in a process group of its own. ``env`` adds to an environment without our settings."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_")}
        self.process = subprocess.Popen(
            [*map(str, command)],
            env={**others, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group to kill as a whole, workers included
        )
        assert self.process.stdout
        assert self.process.stderr
        self._out, self._err = Lines(self.process.stdout), Lines(self.process.stderr)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """`with` this, whatever goes wrong kills the process."""
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def await_log(self, event: str, wanted: Callable[[Fields], bool] = lambda _: True) -> Fields:
        """Return the first structured line of ``event`` that is wanted, as soon as it is there."""

        def fits(line: str) -> bool:
            return line.startswith("{") and (fields := json.loads(line))["event"] == event and wanted(fields)

        line = self._out.first(fits)
        if line is None:
            raise RuntimeError(f"ended with status {self.process.wait()}, never {event!r}:\n{self.output()}")
        found: Fields = json.loads(line)
        return found

    def logs(self, event: str | None = None) -> list[Fields]:
        """The structured lines so far, or those of one event; all of them once the process has ended."""
        lines = map(json.loads, self._out.so_far())
        return [line for line in lines if event is None or line["event"] == event]

    def output(self) -> str:
        """Everything printed so far, on both streams."""
        return "".join([*self._out.so_far(), *self._err.so_far()])

    def wait(self) -> int:
        """Return the exit status once the process has ended and everything it printed is here."""
        status = self.process.wait(PATIENCE)
        self._out.join()
        self._err.join()
        return status

    def terminate(self) -> int:
        """SIGTERM; return the exit status once it has ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        """SIGKILL, as a crash, for its whole group; return the exit status, that of its own end where it has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.wait()
