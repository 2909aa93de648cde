"""The order in which the cases of a bench are measured, and its progress."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def orders(cases: Sequence[T], rounds: int, seed: int) -> list[list[T]]:
    """Return the order of each round: all cases, shuffled; the same for the same seed.

    In a fixed order, leftover work of one case always affects the same next case. Once that made a webhook look 1.6
    times too expensive.
    """
    rng = random.Random(seed)  # noqa: S311  # an order that can be had again, nothing secret
    return [rng.sample(cases, len(cases)) for _ in range(rounds)]


def in_order(
    cases: Sequence[T], rounds: int, seed: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Yield the cases in the order of measurement. Before each round, report its number and the estimated time left."""
    started = clock()
    for number, order in enumerate(orders(cases, rounds, seed)):
        took = clock() - started
        left = f", about {took / number * (rounds - number) / 60:.0f} minutes to go" if number else ""
        say(f"round {number + 1} of {rounds}{left}")
        yield from order
