"""Explores all states (worlds) to which the rules lead, up to the first violation. Fewer steps come first."""

import time
from collections import deque
from typing import NamedTuple

from tests.model.keeping import keeping
from tests.model.serving import Step, serving
from tests.model.world import ASKED, AWAY, NOT_PENDING, STORED, WAITING, Bounds, World, canonical, first, simplified


class Explored(NamedTuple):
    """The result of an exploration.

    ``fault``: the violation, or an empty text. ``trace``: the steps that lead to the state (world) with the violation.
    """

    states: int
    transitions: int
    seconds: float
    fault: str = ""
    trace: tuple[str, ...] = ()


def steps(world: World, bounds: Bounds) -> list[Step]:
    return [*serving(world, bounds), *keeping(world, bounds)]


def fault_of(world: World, bounds: Bounds) -> str:
    """Return the violation in this state (world), or an empty text.

    Live pods, pods that may still be stored, and pods whose containers still run must together fit the limit. A replica
    may reject a pod only if the other pods use the whole limit. Terminating charges count as used.
    """
    live = sum(pod.stage == STORED for pod in world.pods)
    storable = sum(pod.stage == ASKED and pod.yes for pod in world.pods)
    running = sum(pod.runs > 0 for pod in world.pods)
    if live + storable + running > bounds.limit:
        return f"{live} live, {storable} that may be stored and {running} that run on are more than {bounds.limit}"
    for pod in world.pods:
        if world.exists and pod.stage == ASKED and WAITING in pod.at:
            others = (
                live
                + world.terminating
                + sum(
                    each is not pod and each.stage == ASKED and (each.yes or each.pending != NOT_PENDING)
                    for each in world.pods
                )
            )
            if _rejectable(world, live, bounds) >= bounds.limit > others:
                return f"a rejection though only {others} are used"
    return ""


def _rejectable(world: World, live: int, bounds: Bounds) -> int:
    """REJECT: return the usage by which a replica rejects a pod. It is from a LIST that began after the request."""
    if bounds.broken == "rejected by the ledger":
        return world.committed + world.pending + world.terminating
    if bounds.broken == "rejected by a LIST and what is pending":
        return live + sum(pod.pending != NOT_PENDING and pod.stage != STORED for pod in world.pods)
    return live + world.terminating


def explore(bounds: Bounds, rest_every: int = 0) -> Explored:
    """Explore all states (worlds), or stop at the first violation. ``rest_every``: see `Mutant.rest_every`."""
    began, transitions = time.monotonic(), 0
    start = canonical(first(bounds), bounds)
    # Maps each world (state) to the one before it. Equal pods share one object, because a million worlds would not fit
    # into memory otherwise.
    before: dict[World, World | None] = {start: None}
    shared: dict[object, object] = {}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        for _, after in steps(world, bounds):
            transitions += 1
            new = canonical(after, bounds)
            if new in before:
                continue
            new = new._replace(pods=tuple(shared.setdefault(pod, pod) for pod in new.pods))  # type: ignore[misc]  # equal pods
            before[new] = world
            fault = fault_of(new, bounds)
            if not fault and rest_every and len(before) % rest_every == 0:
                fault = unrest_of(new, bounds)
            if fault:
                seconds = time.monotonic() - began
                return Explored(len(before), transitions, seconds, fault, _trace(new, before, bounds))
            queue.append(new)
    return Explored(len(before), transitions, time.monotonic() - began)


def _trace(world: World, before: dict[World, World | None], bounds: Bounds) -> tuple[str, ...]:
    path = [world]
    while (earlier := before[path[-1]]) is not None:
        path.append(earlier)
    # The worlds (states) in `before` may have exchanged names of pods and replicas (see `canonical`). So repeat the
    # steps from the first world, with the original names.
    at, sentences = first(bounds), []
    for to in path[-2::-1]:
        words, at = next(step for step in steps(at, bounds) if canonical(step[1], bounds) == to)
        sentences.append(str(words[0]).format(*words[1:]))
        at = simplified(at, bounds)
    return tuple(sentences)


RESTING = (
    "the ledger is made",
    "marked",
    "the write of",
    "{} has its write",
    "a write lands",
    "{} finds",
    "{} sends",
    "recounted",
    "p{} is proven",
    "the terminating charge",
    "an unseen decrease",
    "a LIST",
    "the reservation",
    "a tick",
)
"""The beginnings of the texts of all steps that neither request, store nor delete a pod, the quickest step first."""


def unrest_of(world: World, bounds: Bounds) -> str:
    """Return a text about charges that are never released, or an empty text.

    From this state (world) on, no pod is requested, stored or deleted. All other steps happen until none is left. Then
    only live pods may be charged.
    """
    quiet = world._replace(
        pods=tuple(pod._replace(at=tuple(AWAY if at == WAITING else at for at in pod.at)) for pod in world.pods)
    )
    for _ in range(200):
        found = [(_rank(words), new) for words, new in steps(quiet, bounds) if new != quiet and _rank(words) >= 0]
        if not found:
            break
        quiet = min(found, key=lambda each: each[0])[1]
    live = sum(pod.stage == STORED for pod in quiet.pods)
    reserves = any(each.amount for each in quiet.reserved)
    if quiet.committed == live and not (quiet.pending or quiet.terminating or reserves):
        return ""
    reserved = [each.amount for each in quiet.reserved]
    held = f"{quiet.pending} pending, {quiet.terminating} terminating"
    return f"at rest {live} are live, {quiet.committed} counted, {held}, {reserved} reserved"


def _rank(words: tuple[object, ...]) -> float:
    sentence = str(words[0])
    if sentence.startswith("{} sends") and (words[2] or words[4]):
        return -1
    rank = next((number for number, each in enumerate(RESTING) if sentence.startswith(each)), -1)
    # Recount by the newest view of the pods first. Recounts by an older view could be repeated forever without
    # progress.
    newest = isinstance(words[-1], int) and sentence.startswith(("recounted", "the reservation"))
    return rank + 0.5 - int(str(words[-1])) / 100 if newest else rank
