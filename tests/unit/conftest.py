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
def clock() -> Clock:
    """Return the replicas' time, which passes by sleeping only."""
    return Clock()


@pytest.fixture
def replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    """Return one webhook replica, with the test's clock if it has one."""
    return _replica(api, request)


@pytest.fixture
def other(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    """Return another webhook replica, beside the first."""
    return _replica(api, request)


def _replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    return Replica(api, request.getfixturevalue("clock") if "clock" in request.fixturenames else None)


@pytest.fixture
def cleaner(api: ApiDouble) -> Cleaner:
    """Return the loop that removes stale allocations, which has seen nothing yet."""
    return Cleaner(api)
