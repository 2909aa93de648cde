"""What placing and binding share: the book, the journal, and the turn in which one of them decides at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import structlog

from controller.extender.book import Book, Promise
from controller.extender.deadline import Deadline
from controller.extender.journal import Journal
from vcuda.errors import Deposed, NotFound, NotPlaced, VcudaError
from vcuda.kube import Kube, segment
from vcuda.objects import Pod

TRIES = 4
"""How often one call places or binds a pod that others change meanwhile; the scheduler itself writes its conditions."""

TIMEOUT = 3.0
"""Seconds for one call to the API server."""

PATIENCE = 5.0
"""Seconds that a call waits for those before it."""

_POD = msgspec.json.Decoder(Pod)


class Named(Protocol):
    """What tells one pod from all others that ever were."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def name(self) -> str:
        """Its name."""


class Desk:
    """One for each process that leads. ``on_lost`` is called when another process leads: this one must end."""

    def __init__(self, kube: Kube, book: Book, journal: Journal, on_lost: Callable[[], None]) -> None:
        self.kube = kube
        self.book = book
        self._journal = journal
        self._on_lost = on_lost
        self._turn = threading.Lock()
        self._log = structlog.get_logger()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Decide alone; raises NotPlaced where those before take too long."""
        if not self._turn.acquire(timeout=PATIENCE):
            raise NotPlaced("placements before this one take too long")
        try:
            yield
        finally:
            self._turn.release()

    def announce(self, promise: Promise, deadline: Deadline) -> float:
        """Count what is to be sent, and write down that it may be; return the seconds for that. Only then may it be.

        The caller has the turn.
        """
        self.book.promise(promise)
        try:
            self._journal.write(self.book.promises(), deadline)
            return deadline.within(TIMEOUT)
        except Deposed:
            self._on_lost()
            raise
        except VcudaError:
            self.book.withdraw(promise)
            raise

    def retract(self, promise: Promise, deadline: Deadline) -> None:
        """Count no more what was refused for certain, and write that down if it can be: the next leader reads it."""
        self.book.withdraw(promise)
        try:
            with self.turn():
                self._journal.write(self.book.promises(), deadline)
        except Deposed:
            self._on_lost()
        except VcudaError as error:
            self._log.info("what was refused still stands in the journal", pod=promise.name, error=str(error))

    def read(self, named: Named, timeout: float = TIMEOUT) -> Pod:
        """Return the pod as it is stored; raises NotPlaced where it is gone, or another has its name."""
        try:
            pod = _POD.decode(self.kube.get(path_of(named), timeout=timeout))
        except NotFound as error:
            raise self._gone(named, "the pod is gone") from error
        if pod.metadata.uid != named.uid:
            raise self._gone(named, "the pod is gone, and another has its name")
        return pod

    def _gone(self, named: Named, message: str) -> NotPlaced:
        """Count nothing more for a pod of ours; a caller may name any uid beside any name."""
        if isinstance(named, Promise):
            self.book.forget(named.uid)
        return NotPlaced(message)


def path_of(named: Named) -> str:
    """Return where a pod is stored."""
    return f"/api/v1/namespaces/{segment(named.namespace)}/pods/{segment(named.name)}"
