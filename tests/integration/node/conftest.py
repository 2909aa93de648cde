"""Fixtures for tests of the node agent, which removes the directories of deleted pods that vendors leave on a node."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node.disk import Agent, Disk
from tests.integration.node.steps import Steps


@pytest.fixture
def disk() -> Iterator[Disk]:
    """The disk of a node. After the test, the tree `Disk.guarded`, which is outside the root, must be unchanged."""
    with tempfile.TemporaryDirectory(prefix="vm-directories-") as base:
        disk = Disk(Path(base))
        disk.furnish()
        with disk.untouched():
            yield disk


@pytest.fixture
def agent(disk: Disk) -> Agent:
    return Agent(disk)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    with monkeypatch.context() as patched:
        yield Steps(patched)
