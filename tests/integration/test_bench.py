"""Tests that run every command of `python -m bench` that needs no whole control plane, with small sizes.

tests/e2e/test_bench.py runs the other commands. The command `extender` needs an API server on PATH.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main

pytestmark = pytest.mark.slow

SIZES = {
    "stale": "stale.PODS, stale.NODES, stale.ROUNDS = 200, 10, 1",
    "events": "events.EVENTS, events.ROUNDS = 10, 1",
    "discover": "discover.NODES, discover.ROUNDS, discover.REPEATS = 20, 1, 10",
    "sweep": "sweep.DIRECTORIES, sweep.LIVE, sweep.ROUNDS = 20, 10, 1",
    "mutate": "mutate.ROUNDS, mutate.SECONDS = 1, 0.2",
    "extender": "extender.NODES, extender.PODS, extender.CALLS = 20, 40, 5",
    "large-pods": "large_pods.MAX_BODY, large_pods.ROUNDS = 100_000, 1",
}
"""For each command, the statement that sets the sizes of its only round."""
ON_A_CONTROL_PLANE = {"creates", "failover", "teams", "scale"}


@pytest.mark.parametrize("command", SIZES)
def test_a_bench_command_prints_a_table(command: str) -> None:
    module = command.replace("-", "_")
    script = f"from bench import {module}; {SIZES[command]}; from bench.__main__ import main; main(['{command}'])"
    env = {**os.environ}
    if command == "extender" and "KUBEBUILDER_ASSETS" not in env:
        if (server := shutil.which("kube-apiserver")) is None:
            pytest.skip(
                "kube-apiserver is not on PATH; put the directory that tests/e2e/build-control-plane prints there"
            )
        env["KUBEBUILDER_ASSETS"] = str(Path(server).parent)
    done = subprocess.run(
        (sys.executable, "-c", script), env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1


def test_every_bench_command_is_run_by_a_test() -> None:
    assert {*SIZES, *ON_A_CONTROL_PLANE} == {*main.commands}
