"""A state machine for reservations (quota that a replica holds in advance).

No charge may exceed the limit, for any order of steps and any faults of replicas, leaders and API calls.
"""

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.reservation_machine import ReservationMachine

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "15"))
"""The number of random examples that the state machine of this file tries. `make fuzz` sets a larger number."""


def test_no_order_of_calls_admits_too_much_or_leaves_a_charge_behind() -> None:
    every = list(HealthCheck)
    run_state_machine_as_test(
        ReservationMachine,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=50, suppress_health_check=every),
    )
