"""Reservations in every order that can be: nothing that befalls replicas, leaders and their calls admits too much."""

import os

from hypothesis import HealthCheck, settings

from tests.reservation_machine import ReservationMachine

EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "80"))
"""More by `make fuzz`."""

ReservationMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestReservations = ReservationMachine.TestCase
