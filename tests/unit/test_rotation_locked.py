"""What is done, and what is not, beside a webhook configuration that may not be written."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from certs.state import Authorities, Problem, Serving
from certs.steps import Forget, IssueLeaf, MakeAuthority, Promote, SetBundles, StepRefused
from tests.rotation_steps import at, go_on, rotated, take
from tests.rotation_world import POLICY, START, World, healthy
from vcuda.x509 import make_authority

LOCK = Problem("validatingwebhookconfiguration/vcuda-quota may not be written", "kubectl edit")


def read_only(world: World) -> World:
    """The world with one of its configurations locked."""
    *rest, last = world.state.configurations
    world.state = replace(world.state, configurations=(*rest, replace(last, read_only=LOCK)))
    return world


def test_a_locked_configuration_is_told_of_though_nothing_is_due() -> None:
    assert at(read_only(healthy()), POLICY) == StepRefused((LOCK,))


def test_a_leaf_is_renewed_beside_a_locked_configuration() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.time += timedelta(days=61)
    assert isinstance(at(world, POLICY), IssueLeaf)


def test_an_authority_that_a_locked_configuration_does_not_trust_is_not_promoted() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.sleep(60)
    steps = []
    while not isinstance(decision := at(world), StepRefused):
        steps.append(type(decision))
        take(world, decision)
    assert decision == StepRefused((LOCK,))
    assert steps == [MakeAuthority, SetBundles]


@pytest.mark.parametrize("restored", [False, True], ids=["both Secrets deleted", "the CA Secret from a backup"])
def test_what_a_locked_configuration_trusts_is_not_replaced_though_it_is_broken(restored: bool) -> None:
    """The pods serve on what it trusts; another leaf would cut it off until a person has unlocked it."""
    world = healthy([timedelta(0)])
    world.sleep(60)
    backup = Authorities(current=make_authority(START - timedelta(days=2)))
    serving = world.state.serving if restored else Serving()
    world.state = replace(world.state, authorities=backup if restored else Authorities(), serving=serving)
    world = read_only(world)
    steps = []
    while not isinstance(decision := at(world), StepRefused):
        steps.append(type(decision))
        take(world, decision)
    assert not {Promote, IssueLeaf} & {*steps}
    assert decision == StepRefused((LOCK,))
    assert world.lost == []


def test_a_locked_configuration_that_may_trust_what_cannot_be_asked_is_not_cut_off() -> None:
    world = read_only(healthy([timedelta(0)]))
    world.state = replace(world.state, serving=Serving())
    [pod] = world.pods
    pod.leaf = None
    world.look()
    decision = at(world, replace(POLICY, issued_before=START + timedelta(hours=1)))
    while isinstance(decision, MakeAuthority | SetBundles):
        take(world, decision)
        decision = at(world, POLICY)
    assert not isinstance(decision, Promote)


def test_a_locked_configuration_that_never_trusted_what_is_served_keeps_no_authority_back() -> None:
    """Somebody's leftover, with another caBundle or none: it has nothing to lose."""
    world = healthy([timedelta(0)])
    world.sleep(60)
    *_, last = world.state.configurations
    hooks = tuple(replace(hook, name=f"old-{hook.name}", bundle=()) for hook in last.hooks)
    leftover = replace(last, name="leftover", read_only=LOCK, hooks=hooks)
    world.state = replace(world.state, configurations=(*world.state.configurations, leftover))
    steps, decision = go_on(world, StepRefused)
    assert {Promote, Forget} <= {*steps}
    assert decision == StepRefused((LOCK,))
    assert world.lost == []


def test_an_authority_that_a_locked_configuration_still_trusts_is_not_forgotten() -> None:
    world = rotated(Forget)
    old = world.state.authorities.retired
    *rest, last = world.state.configurations
    holding = replace(last, read_only=LOCK, hooks=tuple(replace(hook, bundle=old) for hook in last.hooks))
    world.state = replace(world.state, configurations=(*rest, holding))
    assert at(world) == StepRefused((LOCK,))
