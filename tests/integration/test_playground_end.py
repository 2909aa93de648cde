"""Tests of the end of a process of the playground."""

from pathlib import Path

import pytest

from examples.playground.play import PartEnded, check_running
from tests.processes import eventually
from tools.component import Component

pytestmark = pytest.mark.slow


def test_a_part_that_ends_by_itself_ends_the_playground_with_its_log(tmp_path: Path) -> None:
    part = Component("part", ("sh", "-c", "echo out of luck; exit 3"), tmp_path / "log", lambda: True, 10)
    part.launch()
    eventually(lambda: not part.running)
    with pytest.raises(PartEnded, match=r"(?s)part ended with exit status 3\..*out of luck"):
        check_running([part])
