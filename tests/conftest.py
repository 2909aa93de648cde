"""Fixtures for all tests."""

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis must not fail a test because an example takes long, since this depends on the load of the machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger keeps the configuration of its first use. If it is changed, later tests cannot capture its lines."""
    monkeypatch.setattr("vcuda.logs.configure", lambda *_: None)
