"""How long to wait before trying again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 32  # a float would overflow after a thousand; any ceiling is reached long before


@dataclass(slots=True)
class Backoff:
    """Delays in seconds that double from ``first`` to ``ceiling``; each is drawn from the upper half of its step.

    ``draw`` returns a float from 0 to 1. The jitter keeps replicas apart that lost the same API server at once.
    """

    first: float = 0.1
    ceiling: float = 10.0
    draw: Callable[[], float] = random.random
    _steps: int = field(default=0, init=False)

    def next(self) -> float:
        """Return the delay before the next attempt, and double the one after it."""
        step = min(self.ceiling, math.ldexp(self.first, self._steps))
        self._steps = min(self._steps + 1, _MOST_DOUBLINGS)
        return step * (0.5 + self.draw() / 2)

    def reset(self) -> None:
        """Start over: the last attempt was a success."""
        self._steps = 0
