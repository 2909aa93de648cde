"""The random order in which a benchmark measures its cases, and the messages about its progress."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

import click

T = TypeVar("T")

NO_CLAIMS = "ResourceClaims are not measured, because the API server does not serve resource.k8s.io/v1"


def say(line: str) -> None:
    """Report progress on standard error."""
    click.echo(line, err=True)


def orders(cases: Sequence[T], rounds: int, seed: int) -> list[list[T]]:
    """Return all cases in a random order for each round. Equal seeds give equal orders.

    A case may leave unfinished work, which is then measured as part of the next case. In a fixed order, the next case
    would always be the same. For this reason, a webhook once seemed to cost 1.6 times its real cost.
    """
    rng = random.Random(seed)  # noqa: S311  # The seed makes the order repeatable.
    return [rng.sample(cases, len(cases)) for _ in range(rounds)]


def in_order(cases: Sequence[T], rounds: int, seed: int) -> Iterator[T]:
    """Yield the cases in the order of measurement. Before each round, print its number and the estimated time left."""
    started = time.monotonic()
    for number, order in enumerate(orders(cases, rounds, seed)):
        took = time.monotonic() - started
        left = f". About {took / number * (rounds - number) / 60:.0f} minutes are left" if number else ""
        say(f"Measuring round {number + 1} of {rounds}{left}")
        yield from order
