"""Types of flags that click has none for."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number within bounds. Not nan, which click takes to lie within any, and not infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; click.BadParameter where it is none."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number
