"""Fixtures for tests beside one API server double, which replicas share."""

from __future__ import annotations

import pytest

from tests.api_double import ApiDouble
from tests.cleaner import Cleaner
from tests.replicas import Clock, Replica


@pytest.fixture
def api() -> ApiDouble:
    """Return an API server that holds nothing yet."""
    return ApiDouble()


@pytest.fixture
def replica(api: ApiDouble) -> Replica:
    """Return one webhook replica."""
    return Replica(api)


@pytest.fixture
def other(api: ApiDouble) -> Replica:
    """Return another webhook replica, beside the first."""
    return Replica(api)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the replicas' time, which passes by sleeping only."""
    clock = Clock()
    monkeypatch.setattr("webhook.ledger_client.time", clock)
    return clock


@pytest.fixture
def cleaner(api: ApiDouble) -> Cleaner:
    """Return the loop that removes stale allocations, which has seen nothing yet."""
    return Cleaner(api)
