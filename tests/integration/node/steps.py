"""Counts the calls by which a sweep changes a disk. A test can make each of these calls fail."""

import os
from collections.abc import Callable
from typing import Any

import pytest

STEPS = [(os, "unlink"), (os, "rmdir"), (os, "rename")]
"""The functions that change the disk, by module and name. In these tests, each call of such a function is a step."""


class Killed(BaseException):
    """Simulates SIGKILL at a step. It is a BaseException, so that the code under test does not catch it."""


class Steps:
    """Counts the calls that change the disk. Before each call, ``before`` gets its number and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.before: Callable[[int, tuple[Any, ...]], None] = lambda *_: None
        for module, name in STEPS:
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def fail(self, number: int, victim: str | None = None) -> None:
        """Make every step fail with this errno, or only the steps on files named ``victim``."""

        def before(_taken: int, arguments: tuple[Any, ...]) -> None:
            if victim in (None, arguments[0]):
                raise OSError(number, os.strerror(number))

        self.before = before

    def stop(self, point: int, error: BaseException) -> None:
        """Let ``point`` more steps succeed, and raise ``error`` at the next step."""
        last = self.taken + point

        def before(number: int, _arguments: tuple[Any, ...]) -> None:
            if number == last:
                raise error

        self.before = before

    def go_on(self) -> None:
        self.before = lambda *_: None

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **named: Any) -> None:
            number, self.taken = self.taken, self.taken + 1
            self.before(number, arguments)
            call(*arguments, **named)

        return counted
