"""Looks at processes in threads of their own: neither a file system nor a process that hangs may hold up the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from controller.node.refused import Refused
from controller.node.removal import OutOfTime
from controller.node.tree import Mount, Place
from controller.node.usage import InUse, survey
from vcuda.vm_directories import Reason

PATIENCE = 120.0
"""Seconds that a look may stand still. As a whole it may take longer: one at a thousand processes takes about a second,
but anyone can have millions of files open."""

_STEP = 0.2  # seconds between two looks whether the process is to stop
_KEEPS = 2  # times as long as a look took; then what it saw is too old


class Surveyor:
    """Makes one survey after the other. While one hangs no other is begun, and it is not known what is in use."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._look: _Look | None = None

    def survey(self, root: Place, give_up: Callable[[], bool], stopping: Callable[[], bool]) -> InUse:
        """Return what processes hold. Refused where nothing more is seen of it for the patience.

        OutOfTime where ``stopping``, and where ``give_up`` once the patience has passed: then the look goes on, and the
        next call takes it up. A thread that hangs ends with the process: such waits are killable.
        """
        look = self._look = self._earlier(root.mount) or _Look(root)
        while not look.answer.done():
            if stopping():
                raise OutOfTime
            now = time.monotonic()
            if now - look.moved > self._patience:
                look.hung = True
                raise Refused(Reason.UNSEEN, f"nothing has moved for {self._patience:g} s")
            if now - look.began > self._patience and give_up():
                raise OutOfTime
            wait([look.answer], _STEP)
        self._look = None
        return look.answer.result()

    def _earlier(self, mount: Mount) -> _Look | None:
        """Return the look that is to be taken up, if there is one; Refused while one goes on that is of no use."""
        look = self._look
        if look is None or look.is_of_use(mount):
            return look
        if not look.answer.done():
            raise Refused(Reason.UNSEEN, "an earlier look has not ended")
        return None


class _Look:
    """One look, which begins at once. ``moved``: when it last saw something; ``hung``: that was too long ago."""

    def __init__(self, root: Place) -> None:
        self.answer: Future[InUse] = Future()
        self.began = self.moved = time.monotonic()
        self.hung = False
        self._mount = root.mount
        threading.Thread(target=self._run, args=(root,), name="survey", daemon=True).start()

    def is_of_use(self, mount: Mount) -> bool:
        """Return whether it tells what is in use on this mount by now."""
        if self.hung or mount != self._mount:
            return False
        return not self.answer.done() or time.monotonic() - self.moved <= _KEEPS * (self.moved - self.began)

    def _run(self, root: Place) -> None:
        try:
            self.answer.set_result(survey(root.fd, root.mount, moved=self._move))
        except BaseException as error:  # noqa: BLE001  # it is raised where the answer is waited for
            self.answer.set_exception(error)

    def _move(self) -> None:
        self.moved = time.monotonic()
