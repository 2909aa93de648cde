"""Tests of ``python -m examples.demo``, as ``make demo`` runs it, and of the end of a process of the playground."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from examples.playground.play import PartEnded, check_running
from tests.processes import eventually
from tools.component import Component

ROOT = Path(demo.__file__).parents[1]


def test_the_demo_explains_each_step_fits_a_terminal_and_leaves_no_server_running() -> None:
    command = (sys.executable, "-m", "examples.demo")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Starting vcuda-webhook serve --standalone --quota manifests/examples/gpuquota.yaml")
    assert lines[1].startswith("It serves https://127.0.0.1:")
    assert "team-a may use 2 cards of M40, 1 card of P100, in pool public" in lines
    assert lines[-1].startswith("14 pods and claims: 8 admitted, ")
    assert max(map(len, lines)) <= 140
    [at] = [number for number, line in enumerate(lines) if line.startswith("team-a/p100-again")]
    assert lines[at].split()[1:] == ["1", "card", "refused"]
    assert lines[at + 1].strip().startswith("exceeded GPU quota: P100 in namespace team-a, requested: 1 card")
    port = int(lines[1].partition(",")[0].rpartition(":")[2])
    listening = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert ["0100007F", f"{port:04X}", "0A"] not in [[*local.split(":"), state] for local, _, state in listening]


def test_a_part_that_ends_by_itself_ends_the_playground_with_its_log(tmp_path: Path) -> None:
    part = Component("part", ("sh", "-c", "echo out of luck; exit 3"), tmp_path / "log", lambda: True, 10)
    part.launch()
    eventually(lambda: not part.running)
    with pytest.raises(PartEnded, match=r"(?s)part ended with exit status 3\..*out of luck"):
        check_running([part])
