"""Checks and explores the states (worlds) of the model: the allotments, and whether everything drains."""

import functools
import random
import time
from collections import deque

from tests.model.explore import Explored
from tests.model.teams.keeping import (
    begin_lower,
    begin_open,
    begin_update,
    edits,
    ledgers,
    lower,
    missing_ledgers,
    open_team,
    pods,
    update,
)
from tests.model.teams.raising import (
    AGAIN,
    Rule,
    Step,
    admit,
    cover,
    give_up,
    name,
    place,
    raise_ledger,
    raise_team,
    team_name,
)
from tests.model.teams.world import NAMESPACES, NONE, NOTHING, TEAMS, Bounds, Procedure, World, covers, first, less

RULES: tuple[Rule, ...] = (
    *(pods, edits, missing_ledgers, ledgers, place, admit, cover, raise_team, raise_ledger),
    *(begin_lower, lower, begin_open, open_team, begin_update, update, give_up),
)


def steps(world: World, bounds: Bounds) -> list[Step]:
    return [(words, canonical(after, bounds)) for rule in RULES for words, after in rule(world, bounds)]


def canonical(world: World, bounds: Bounds) -> World:
    """Return one world (state) for all that differ only in procedures that can no longer write anything."""
    if not world.procedures:
        return world
    left = [each for each in world.procedures if each.fresh or each.checked is None or bounds.broken == AGAIN]
    return world._replace(procedures=tuple(sorted(left, key=_key)))


@functools.cache
def _key(procedure: Procedure) -> str:
    return repr(procedure)


def uncovered(world: World) -> str:
    """Return an error if a team ledger allots less than a namespace's ledger may use, or than its pods use."""
    for team, here in enumerate(world.teams):
        for n in NAMESPACES if here and not here.closed else ():
            ledger, amount = world.ledgers[n], here.allotted[n] if here else None
            own = ledger.allotments[team] if ledger else None
            if own and not covers(amount, own.charges):
                return f"{name(n)} may use {own.charges}, and {team_name(team)} allots {amount}"
            used = less(world.held[n], world.brought[n])
            if world.member[n] == team and not covers(amount, used):
                return f"{name(n)} uses {used}, and {team_name(team)} allots {amount}"
    return ""


AT_REST = ("one more", "admits", "a pod", "is given up", " is lost", " is deleted", " ends", "is made again")
"""Parts of the texts of steps that `unrest_of` leaves out."""

REST_STEPS = 100


def unrest_of(world: World, bounds: Bounds) -> str:
    """Return an error if quota stays allotted that no pod uses, or if a move does not end; or an empty text.

    From this state (world) on, no pod is requested or ends, and nothing is lost. All other steps happen until none is
    left.
    """
    quiet = world._replace(procedures=())
    for _ in range(REST_STEPS):
        found = [
            each for each in steps(quiet, bounds) if each[1] != quiet and not any(one in each[0] for one in AT_REST)
        ]
        if found:
            quiet = found[-1][1]
        elif quiet.procedures:
            quiet = quiet._replace(procedures=())
        else:
            break
    else:
        return f"no rest after {REST_STEPS} steps"
    for n, team_now in enumerate(bounds.documents[-1].places):
        ledger = quiet.ledgers[n]
        used = ledger.used if ledger else NOTHING
        names = (team_now,) if team_now != NONE else ()
        if used != quiet.held[n] or (ledger and ledger.names != names):
            return f"at rest {name(n)} has {ledger}"
        for team in TEAMS:
            here = quiet.teams[team]
            if here is None or here.closed or (here.allotted[n] or NOTHING) != (used if team == team_now else NOTHING):
                return f"at rest {team_name(team)} has {here}, and {name(n)} uses {used}"
    return ""


def explore(bounds: Bounds, rest_every: int = 0, *, charges: bool = False) -> Explored:
    """Explore all states (worlds) up to the first violation. Fewer steps come first.

    ``rest_every``: check every so many states by `unrest_of`. ``charges``: also check `uncovered`.
    """
    began, transitions, start = time.monotonic(), 0, canonical(first(bounds), bounds)
    before: dict[World, tuple[World, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        for words, new in steps(world, bounds):
            transitions += 1
            if new in before:
                continue
            before[new] = world, words
            fault = new.fault or (charges and uncovered(new))
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


def walk(bounds: Bounds, seed: int, length: int = 150) -> Explored:
    """Take random steps, up to the first violation. At the end, check the last state by `unrest_of`."""
    began, chance = time.monotonic(), random.Random(seed)  # noqa: S311  # a test needs no secret
    world, taken, fault = canonical(first(bounds), bounds), list[str](), ""
    while not fault and len(taken) < length and (found := steps(world, bounds)):
        words, world = chance.choice(found)
        taken.append(words)
        fault = world.fault or uncovered(world)
    fault = fault or unrest_of(world, bounds)
    return Explored(len(taken), len(taken), time.monotonic() - began, fault, tuple(taken))
