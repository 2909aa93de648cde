"""What holds for all tests."""

import pytest


@pytest.fixture(autouse=True)
def logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is run within the process of the tests does not set up its logs.

    Loggers keep what was set up when they were first used, and later tests could not capture their lines.
    """
    monkeypatch.setattr("vcuda.logs.configure", lambda *_: None)
