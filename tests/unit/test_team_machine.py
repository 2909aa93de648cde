"""A state machine for team ledgers: no order of steps may exceed a limit, or leave quota allotted that no pod uses."""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.team_machine import TeamMachine

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "60"))
"""The number of random examples that the state machine tries. `make fuzz` sets a larger number."""


def test_no_order_of_steps_exceeds_a_limit_or_leaves_quota_allotted() -> None:
    every = list(HealthCheck)
    run_state_machine_as_test(
        TeamMachine, settings=settings(max_examples=EXAMPLES, stateful_step_count=50, suppress_health_check=every)
    )
