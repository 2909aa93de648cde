"""Fixtures for all tests."""

import pytest
from hypothesis import HealthCheck, settings

# The time of an example depends on the load of the machine, so no test fails because of it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that run within the test process from configuring logs.

    Loggers keep the configuration of their first use, and later tests could not capture their lines.
    """
    monkeypatch.setattr("vcuda.logs.configure", lambda *_: None)
