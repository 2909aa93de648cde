"""The random order in which a bench measures its cases. This module also reports the progress of the bench."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def orders(cases: Sequence[T], rounds: int, seed: int) -> list[list[T]]:
    """Return for each round all cases in a random order. Equal seeds give equal orders.

    In a fixed order, unfinished work of one case would always be measured as part of the same next case. Once that made
    a webhook appear 1.6 times as expensive as it is.
    """
    rng = random.Random(seed)  # noqa: S311  # the seed makes the order repeatable
    return [rng.sample(cases, len(cases)) for _ in range(rounds)]


def in_order(
    cases: Sequence[T], rounds: int, seed: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> Iterator[T]:
    """Yield the cases in the order of measurement. Before each round, print its number and the estimated time left."""
    started = clock()
    for number, order in enumerate(orders(cases, rounds, seed)):
        took = clock() - started
        left = f", about {took / number * (rounds - number) / 60:.0f} minutes to go" if number else ""
        say(f"round {number + 1} of {rounds}{left}")
        yield from order
