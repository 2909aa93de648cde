"""Processes that are killed without warning and started again, as a Deployment would: replicas and controllers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from tests.e2e.controller_process import flags_of
from tests.e2e.installation import Installation
from tests.processes import PATIENCE, ControllerProcess, WebhookProcess


class Killable(Protocol):
    """What the two kinds of process have in common."""

    process: subprocess.Popen[str]

    def kill(self) -> object:
        """SIGKILL; on return the process is gone."""


P = TypeVar("P", bound=Killable)


class Victim(Generic[P]):
    """One process of a Deployment: where it ends, another takes its place, made by ``start`` in the background."""

    def __init__(self, start: Callable[[], P], threads: ThreadPoolExecutor, first: P | None = None) -> None:
        self.kills = 0
        self._start = start
        self._threads = threads
        self._running: Future[P] = Future()
        self._running.set_result(first or start())

    def current(self) -> P:
        """The newest process, once it serves."""
        return self._running.result(PATIENCE)

    def serving(self) -> P | None:
        """The same, or None while it is on its way or has ended."""
        if not self._running.done() or self.current().process.poll() is not None:
            return None
        return self.current()

    def kill(self) -> None:
        """SIGKILL, and start another."""
        self.kills += 1
        self.current().kill()
        self._again()

    def mend(self) -> None:
        """Start another where it has ended by itself, as a controller does that lost its lease."""
        if self._running.done() and self.current().process.poll() is not None:
            self.current().kill()
            self._again()

    def close(self) -> None:
        """End the newest process for good."""
        self.current().kill()

    def _again(self) -> None:
        self._running = self._threads.submit(self._start)


@contextmanager
def replicas(installation: Installation) -> Iterator[Sequence[Victim[WebhookProcess]]]:
    """The installation's replicas as things to kill; a new one listens where the old one did."""

    def starter(first: WebhookProcess) -> Callable[[], WebhookProcess]:
        flags = (*installation.flags, "--bind", urlsplit(first.url).netloc)
        return lambda: WebhookProcess(flags, installation.ca, {})

    with ThreadPoolExecutor() as threads:
        every = [Victim(starter(first), threads, first) for first in installation.replicas]
        try:
            yield every
        finally:
            for replica in every:
                replica.close()


class Controllers:
    """Candidates for one lease."""

    def __init__(self, candidates: Sequence[Victim[ControllerProcess]]) -> None:
        self._candidates = candidates
        self._leader: ControllerProcess | None = None

    @property
    def kills(self) -> int:
        """How many leaders were killed."""
        return sum(candidate.kills for candidate in self._candidates)

    def kill_seasoned_leader(self) -> None:
        """SIGKILL the leader if it led already when this was asked last, so that each one gets to settle something."""
        leader = next((candidate for candidate in self._candidates if leads(candidate)), None)
        process = leader.serving() if leader else None
        if leader and process is self._leader:
            leader.kill()
        self._leader = process

    def mend(self) -> None:
        """Replace those that have ended by themselves."""
        for candidate in self._candidates:
            candidate.mend()

    def output(self) -> str:
        """What those that run now have printed."""
        return "\n\n".join(candidate.current().output() for candidate in self._candidates)


def leads(candidate: Victim[ControllerProcess]) -> bool:
    """Whether it holds the lease, as far as it knows."""
    process = candidate.serving()
    return process is not None and bool(process.logs("leading"))


@contextmanager
def controllers(installation: Installation, count: int, *, storable: int) -> Iterator[Controllers]:
    """So many controllers, which take a pod for never stored after ``storable`` seconds."""
    flags = flags_of(installation, "--storable-seconds", str(storable))
    with ThreadPoolExecutor() as threads:
        every = [Victim(lambda: ControllerProcess(*flags), threads) for _ in range(count)]
        try:
            yield Controllers(every)
        finally:
            for candidate in every:
                candidate.close()
