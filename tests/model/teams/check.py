"""Checks each state (world) of the model: the limits, the charges, and whether all moves end.

The limits bind admissions. A move or an edit may bring charges that exceed them: then nothing is admitted until enough
of them ended. So each limit has a cap. The cap is the limit, or what was used when a namespace joined, if that is more.
The cap falls with the usage.
"""

from tests.model.teams.keeping import keeping
from tests.model.teams.replicas import RULES, Step, ledger_name, namespace_name
from tests.model.teams.world import (
    AWAY,
    ENDED,
    ENDLESS,
    LEDGERS,
    LINGERS,
    NAMESPACES,
    OPEN,
    STORED,
    WAITING,
    YES,
    Bounds,
    World,
    added,
    canonical,
    charged,
    limits_of,
    parts_of,
    pods_of,
    used_by,
)

Amounts = tuple[int, int, int]

EVERYTHING = (ENDLESS,) * 3


def steps(world: World, bounds: Bounds) -> list[Step]:
    found = [step for rule in RULES for step in rule(world, bounds)]
    found += keeping(world, bounds)
    return [(words, canonical(with_caps(world, after, bounds))) for words, after in found]


def members(world: World, ledger: int) -> set[int]:
    """Return the namespaces whose pods count against a ledger's limits: their marks name the ledger."""
    return {n for n in NAMESPACES if (mark := world.marks[n]) and mark.ledger == ledger and not world.uncounted[n]}


def used_in(world: World, ledger: int, bounds: Bounds) -> Amounts:
    """Return the usage that a ledger records: the sum of its parts. A closed ledger, which admits nothing, is full."""
    here = world.ledgers[ledger]
    return added(used_by(bounds, here.parts[0]), used_by(bounds, here.parts[1])) if here.up else EVERYTHING


def used_for(world: World, namespace: int, bounds: Bounds) -> Amounts:
    """Return the usage that the ledgers record for a namespace: its part in the ledger that its mark names."""
    mark = world.marks[namespace]
    part = world.ledgers[mark.ledger].parts[namespace] if mark else None
    return used_by(bounds, part) if mark and part and part.id == mark.id else EVERYTHING


def with_caps(before: World, after: World, bounds: Bounds) -> World:
    """Return the world (state) after a step, with its new caps. A cap is the limit, or what was used before if more."""
    if after.ledgers is before.ledgers and after.marks is before.marks and not _learned(before, after):
        return after
    caps = []
    for ledger in LEDGERS:
        base = limits_of(bounds, after.replicas, ledger=ledger)
        used = used_in(after, ledger, bounds)
        joined = members(after, ledger) - members(before, ledger)
        caps.append(_cap(base, used, EVERYTHING if joined else before.caps[ledger]))
    for n in NAMESPACES:
        base = limits_of(bounds, after.replicas, namespace=n)
        used = used_for(after, n, bounds)
        joins = before.uncounted[n] and not after.uncounted[n]
        caps.append(_cap(base, used, EVERYTHING if joins else before.caps[2 + n]))
    return after._replace(caps=tuple(caps))


def _learned(before: World, after: World) -> bool:
    return [each.document for each in before.replicas] != [each.document for each in after.replicas]


def _cap(base: Amounts, used: Amounts, earlier: Amounts) -> Amounts:
    return (
        max(base[0], min(used[0], earlier[0])),
        max(base[1], min(used[1], earlier[1])),
        max(base[2], min(used[2], earlier[2])),
    )


def fault_of(world: World, bounds: Bounds) -> str:
    """Return the violation in this state (world), or an empty text.

    The pods of a namespace, and of all namespaces of a ledger, must fit the limit of each model, and of all models
    together. Pods count if they are stored, may be stored, or have containers that run.
    """
    real = [charged(bounds, pods_of(world, bounds, n, YES, STORED, LINGERS)) for n in NAMESPACES]
    for n in NAMESPACES:
        if _exceeds(real[n], world.caps[2 + n]):
            return f"{real[n]} pods of {namespace_name(n)} exceed {world.caps[2 + n]}"
    for ledger in LEDGERS:
        pods = 0, 0, 0
        for n in members(world, ledger):
            pods = added(pods, real[n])
        if _exceeds(pods, world.caps[ledger]):
            return f"{pods} pods in {ledger_name(ledger)} exceed {world.caps[ledger]}"
    return ""


def uncharged(world: World, bounds: Bounds) -> str:
    """Return an error if the ledger in a namespace's mark counts fewer pods than there are, or an empty text."""
    for n in NAMESPACES:
        mark, pods = world.marks[n], charged(bounds, pods_of(world, bounds, n, YES, STORED, LINGERS))
        if mark and not world.uncounted[n] and world.ledgers[mark.ledger].up:
            used = used_for(world, n, bounds)
            if used == EVERYTHING or _exceeds(pods, used):
                return f"{pods} pods of {namespace_name(n)}, and {ledger_name(mark.ledger)} counts {used}"
    return ""


def _exceeds(pods: Amounts, limits: Amounts) -> bool:
    return pods[0] > limits[0] or pods[1] > limits[1] or pods[2] > limits[2]


AT_REST = (
    "is asked",
    "reads document",
    "is stored",
    "is deleted",
    "admits",
    "crashes",
    "is lost",
    "ends by",
    "is sent",
)
"""Parts of the texts of steps that `unrest_of` leaves out."""

REST_STEPS = 150


def unrest_of(world: World, bounds: Bounds) -> str:
    """Return an error if anything stays charged, reserved, frozen or closed, or an empty text.

    From now on, no pod is requested, stored or deleted, and nothing is lost. All other steps happen until none is left.
    """
    pods = tuple(pod._replace(stage=ENDED, where=AWAY) if pod.where == WAITING else pod for pod in world.pods)
    quiet = canonical(world._replace(pods=pods, ends=0))
    for _ in range(REST_STEPS):
        found = [each for words, each in steps(quiet, bounds) if each != quiet and _is_rest(words)]
        if not found:
            break
        quiet = found[0]
    else:
        return f"no rest after {REST_STEPS} steps"
    for ledger, n, part in parts_of(quiet):
        mark, stored = quiet.marks[n], pods_of(quiet, bounds, n, STORED)
        left = part.pending or part.terminating or any(part.reserved) or part.orphans
        if part.state != OPEN or left or part.committed != stored or not mark or mark.ledger != ledger:
            return f"at rest {ledger_name(ledger)} has {part} of {namespace_name(n)}, {stored} stored, and {mark}"
    for n, mark in enumerate(quiet.marks):
        if mark and not (quiet.ledgers[mark.ledger].up and quiet.ledgers[mark.ledger].parts[n]):
            return f"at rest the mark of {namespace_name(n)} names no part"
    return ""


def _is_rest(words: str) -> bool:
    if " writes " in words:
        return "adds []" in words and "reserves [0, 0]" in words
    return not any(each in words for each in AT_REST)
