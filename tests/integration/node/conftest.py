"""Fixtures for tests of the node agent on real directories."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.node.disk import Agent, Disk


@pytest.fixture
def disk() -> Iterator[Disk]:
    """A node's disk, whose tree outside the root has to be the same afterwards."""
    with tempfile.TemporaryDirectory(prefix="vm-directories-") as base:
        disk = Disk(Path(base))
        disk.furnish()
        with disk.untouched():
            yield disk


@pytest.fixture
def agent(disk: Disk) -> Agent:
    """An agent that has just been started."""
    return Agent(disk)
