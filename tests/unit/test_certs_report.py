"""What `vcuda-certs status` says of a state, and what it sends a person to."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from certs.parsing import Place
from certs.report import Report, report_on
from certs.state import Problem
from certs.steps import Terms
from tests.rotation_world import TERMS, World, healthy

PLACE = Place("vcuda-quota", "vcuda-webhook", "vcuda-webhook-ca", "vcuda-webhook-tls")


def report(world: World, terms: Terms = TERMS) -> Report:
    return report_on(world.read(world.now), PLACE, world.now(), terms, "rotate-now")


def test_where_all_is_well_nobody_is_needed() -> None:
    found = report(healthy())
    assert found.problems == ()
    assert {call.fault for call in found.calls} == {""}


@pytest.mark.parametrize("days", [0, 61], ids=["nothing is due", "a leaf is due"])
def test_a_configuration_that_is_locked_is_a_persons_to_unlock(days: int) -> None:
    world, lock = healthy(), Problem("vcuda-quota is without our label", "kubectl label")
    first, *rest = world.state.configurations
    world.state = replace(world.state, configurations=(replace(first, locked=lock), *rest))
    world.time += timedelta(days=days)
    assert report(world).problems == (lock,)
