"""Looks at processes in a thread of its own: neither a file system nor a process that hangs may hold up the agent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from controller.node.refused import Refused
from controller.node.removal import OutOfTime
from controller.node.tree import Place
from controller.node.usage import InUse, survey
from vcuda.vm_directories import Reason

PATIENCE = 120.0
"""Seconds that a look may take; one at a thousand processes takes about one."""

_STEP = 0.2  # seconds between two looks whether the process is to stop


class Surveyor:
    """Makes one survey after the other. While one hangs no other is begun, and it is not known what is in use."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._answer: Future[InUse] | None = None

    def survey(self, root: Place, stopping: Callable[[], bool]) -> InUse:
        """Return what processes hold. Refused where that is not seen in time, OutOfTime where ``stopping``.

        A thread that hangs ends with the process: such waits are killable.
        """
        if self._answer and not self._answer.done():
            raise Refused(Reason.UNSEEN, "an earlier look has not ended")
        answer = self._answer = Future()
        threading.Thread(target=_answer, args=(answer, root), name="survey", daemon=True).start()
        deadline = time.monotonic() + self._patience
        while not answer.done():
            if stopping():
                raise OutOfTime
            if time.monotonic() > deadline:
                raise Refused(Reason.UNSEEN, f"no answer within {self._patience:g} s")
            wait([answer], _STEP)
        return answer.result()


def _answer(answer: Future[InUse], root: Place) -> None:
    try:
        answer.set_result(survey(root.fd, root.mount))
    except BaseException as error:  # noqa: BLE001  # it is raised where the answer is waited for
        answer.set_exception(error)
