"""A rotation taken step by step in a world of values, as its plan says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from certs.plan import plan
from certs.steps import (
    Decision,
    Forget,
    IssueLeaf,
    MakeAuthority,
    NoteServed,
    NoteTrusted,
    Promote,
    RotationPolicy,
    SeenFor,
    SetBundles,
    Wait,
    write_of,
)
from tests.rotation_world import POLICY, START, World, healthy

LONG = timedelta(days=1000)
SEEN_LONG = SeenFor(LONG, LONG, LONG)
NEW = replace(POLICY, issued_before=START + timedelta(seconds=30))
"""Every certificate of a healthy world is to be replaced."""


def at(world: World, policy: RotationPolicy = NEW, seen: SeenFor = SEEN_LONG) -> Decision:
    """What is decided as the world is now."""
    return plan(world.read(world.now), world.now(), policy, seen)


def take(world: World, decision: Decision, policy: RotationPolicy = NEW) -> None:
    """Do what was decided; endpoints follow at once."""
    assert isinstance(decision, MakeAuthority | SetBundles | NoteTrusted | Promote | IssueLeaf | NoteServed | Forget)
    world.write(write_of(decision, world.read(world.now), world.now(), policy))


def go_on(world: World, until: type[Decision], policy: RotationPolicy = NEW) -> tuple[list[type[Decision]], Decision]:
    """Take every step and sit every wait out until a decision is one of ``until``; return those taken, and it."""
    taken: list[type[Decision]] = []
    while not isinstance(decision := at(world, policy), until):
        taken.append(type(decision))
        if isinstance(decision, Wait):
            assert decision.until
            world.sleep((decision.until - world.now()).total_seconds())
        else:
            take(world, decision, policy)
    return taken, decision


def rotated(until: type[Decision], policy: RotationPolicy = NEW) -> World:
    """A world in the middle of a rotation: the next step, or wait, is one of ``until``."""
    world = healthy([timedelta(0)] * 2)
    world.sleep(60)
    go_on(world, until, policy)
    return world
