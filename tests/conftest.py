"""Fixtures for all tests."""

import pytest


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep commands that run within the test process from configuring logs.

    Loggers keep the configuration of their first use, and later tests could not capture their lines.
    """
    monkeypatch.setattr("vcuda.logs.configure", lambda *_: None)
