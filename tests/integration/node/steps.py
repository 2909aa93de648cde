"""Counts the calls by which a sweep changes a disk. Each of them may fail."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from controller.garbage.node import fs

STEPS = [(os, "mkdir"), (os, "unlink"), (os, "rmdir"), (fs, "rename")]
"""Every call that changes the disk."""


class Killed(BaseException):
    """The process is killed here, as by SIGKILL. The code must not catch it, and cleanup may only close files."""


class Steps:
    """Counts the changing calls. ``before`` is called with the number and the arguments of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.before: Callable[[int, tuple[Any, ...]], None] = lambda *_: None
        for module, name in STEPS:
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def fail(self, number: int, victim: str | None = None) -> None:
        """Have every step fail with this error number. With ``victim``, only steps on this name fail."""

        def before(_taken: int, arguments: tuple[Any, ...]) -> None:
            if victim in (None, arguments[0]):
                raise OSError(number, os.strerror(number))

        self.before = before

    def stop(self, point: int, error: BaseException) -> None:
        """Raise the error at the step that so many others precede from now."""
        last = self.taken + point

        def before(number: int, _arguments: tuple[Any, ...]) -> None:
            if number == last:
                raise error

        self.before = before

    def go_on(self) -> None:
        """Have no further step fail."""
        self.before = lambda *_: None

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **named: Any) -> None:
            number, self.taken = self.taken, self.taken + 1
            self.before(number, arguments)
            call(*arguments, **named)

        return counted
