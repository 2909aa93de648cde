"""The calls by which a sweep changes a disk, counted one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from controller.node import fs as removal
from controller.node import trash

STEPS = [(os, "mkdir"), (os, "unlink"), (os, "rmdir"), (trash, "rename"), (removal, "rename")]
"""Every call that changes anything on a disk."""


class Steps:
    """Counts the calls that change something; ``before`` is called with the number and the arguments of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self.before: Callable[[int, tuple[Any, ...]], None] = lambda *_: None
        for module, name in STEPS:
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any, **named: Any) -> None:
            number, self.taken = self.taken, self.taken + 1
            self.before(number, arguments)
            call(*arguments, **named)

        return counted
