"""Explores all states (worlds) of the model of team ledgers up to the first violation. Fewer steps come first."""

import random
import time
from collections import deque

from tests.model.explore import Explored
from tests.model.teams.check import fault_of, steps, uncharged, unrest_of
from tests.model.teams.world import Bounds, World, canonical, first


def explore(bounds: Bounds, rest_every: int = 0, *, charges: bool = False) -> Explored:
    """Explore all states (worlds), or stop at the first violation.

    ``rest_every``: check every so many states by `unrest_of`. ``charges``: also check that each part counts at least
    the pods of its namespace.
    """
    began, transitions = time.monotonic(), 0
    start = canonical(first(bounds))
    before: dict[World, tuple[World, str] | None] = {start: None}
    shared: dict[object, object] = {}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        for words, after in steps(world, bounds):
            transitions += 1
            if after in before:
                continue
            new = World(*[shared.setdefault(each, each) for each in after])  # type: ignore[arg-type]  # equal fields
            before[new] = world, words
            fault = fault_of(new, bounds) or (charges and uncharged(new, bounds))
            if not fault and rest_every and len(before) % rest_every == 0:
                fault = unrest_of(new, bounds)
            if fault:
                return Explored(len(before), transitions, time.monotonic() - began, fault, _trace(new, before))
            queue.append(new)
    return Explored(len(before), transitions, time.monotonic() - began)


def _trace(world: World, before: dict[World, tuple[World, str] | None]) -> tuple[str, ...]:
    words = []
    while found := before[world]:
        world, step = found
        words.append(step)
    return tuple(reversed(words))


def walk(bounds: Bounds, seed: int, length: int = 120) -> Explored:
    """Take random steps, up to the first violation. At the end, check the last state by `unrest_of`."""
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311  # a test needs no secret
    world, taken, fault = canonical(first(bounds)), list[str](), ""
    while not fault and len(taken) < length and (found := steps(world, bounds)):
        words, world = chance.choice(found)
        taken.append(words)
        fault = fault_of(world, bounds) or uncharged(world, bounds)
    fault = fault or unrest_of(world, bounds)
    return Explored(len(taken), len(taken), time.monotonic() - began, fault, tuple(taken))
