"""Tests of the rules of the ledger by a model, which explores every state within small bounds.

`python -m tests.model --full` explores larger bounds.
"""

import pytest

from tests.model.cases import MUTANTS, SMALL, Mutant
from tests.model.explore import explore
from tests.model.world import Bounds

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bounds", SMALL.values(), ids=SMALL.keys())
def test_no_interleaving_exceeds_the_limit_or_leaves_a_charge_behind(bounds: Bounds) -> None:
    explored = explore(bounds, rest_every=100)
    assert not explored.fault, "\n".join([explored.fault, *explored.trace])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.rule}: {mutant.broken}")
def test_every_rule_is_needed(mutant: Mutant) -> None:
    """With a wrong rule in place of any rule, usage exceeds the limit, a 403 is wrong, or a charge never ends."""
    explored = explore(mutant.broken_bounds, rest_every=mutant.rest_every)
    assert explored.fault
    assert explored.trace
