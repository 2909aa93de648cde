"""Fixtures for tests of the node agent on real directories."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node.disk import Agent, Disk
from tests.integration.node.steps import Steps


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A node's disk. The tree outside the root must be unchanged at the end."""
    with tempfile.TemporaryDirectory(prefix="vm-directories-") as base:
        disk = Disk(Path(base))
        disk.furnish()
        with disk.untouched():
            yield disk


@pytest.fixture
def agent(disk: Disk) -> Agent:
    """An agent that has just been started."""
    return Agent(disk)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """The steps of all sweeps of the test. The patches end before the disk is removed."""
    with monkeypatch.context() as patched:
        yield Steps(patched)
