"""Tests of the rules of team ledgers, by a model with two namespaces, two teams, losses, late writes and edits."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.model.cases import Mutant
from tests.model.teams.cases import DEEP, MUTANTS, SMALL, WALKS
from tests.model.teams.check import explore, steps, unrest_of, walk
from tests.model.teams.world import Bounds, World, first

WALKED = int(os.environ.get("MODEL_WALKS", "5"))
"""The number of random walks within each of their bounds. `make fuzz` sets a larger number, and explores `DEEP` too."""

EXPLORED = SMALL | (DEEP if "MODEL_WALKS" in os.environ else {})

SCENARIOS: Mapping[str, list[str]] = yaml.safe_load(
    (Path(__file__).parent.parent / "data" / "team-scenarios.yaml").read_text()
)
"""By broken rule: the steps of the model that lead to a violation if the rule is broken."""


@pytest.mark.slow
@pytest.mark.parametrize("bounds", EXPLORED.values(), ids=EXPLORED.keys())
def test_no_order_of_raises_moves_and_losses_exceeds_a_limit_or_leaves_quota_allotted(bounds: Bounds) -> None:
    explored = explore(bounds, rest_every=100, charges=True)
    assert not explored.fault, "\n".join([explored.fault, *explored.trace])


@pytest.mark.slow
@pytest.mark.parametrize("bounds", WALKS.values(), ids=WALKS.keys())
def test_no_random_walk_of_many_pods_and_edits_exceeds_a_limit_or_leaves_quota_allotted(bounds: Bounds) -> None:
    for seed in range(WALKED):
        walked = walk(bounds, seed)
        assert not walked.fault, "\n".join([f"seed {seed}: {walked.fault}", *walked.trace])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}: {mutant.broken}")
def test_every_rule_of_a_team_ledger_is_needed(mutant: Mutant) -> None:
    """Each test replaces a rule by a wrong one. Then usage exceeds a limit, or a move never ends."""
    explored = explore(mutant.broken_bounds, rest_every=1 if mutant.rests else 0)
    assert explored.fault
    assert explored.trace


def replayed(words: list[str], bounds: Bounds) -> World | None:
    """Return the state (world) after these steps. None if the rules do not permit all of them."""
    world = first(bounds)
    for each in words:
        found = [after for sentence, after in steps(world, bounds) if sentence == each]
        if not found:
            return None
        world = found[0]
    return world


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}: {mutant.broken}")
def test_each_broken_rule_has_a_short_scenario_that_only_the_broken_rule_permits(mutant: Mutant) -> None:
    scenario = SCENARIOS[mutant.broken]
    broken = replayed(scenario, mutant.broken_bounds)
    assert broken
    assert unrest_of(broken, mutant.broken_bounds) if mutant.rests else broken.fault
    right = replayed(scenario, mutant.bounds)
    assert right is None or not (right.fault or unrest_of(right, mutant.bounds))
