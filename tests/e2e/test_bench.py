"""Tests that run the commands of `python -m bench` with a control plane, for a fraction of a second each."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.arrangements import CLAIMS_OURS, FLASK_PIN, NONE, OURS_1, TEAMS, TIGHT
from tests.e2e.cluster import Cluster
from tests.e2e.dra import served

ARRANGEMENTS = (NONE, FLASK_PIN, OURS_1, TEAMS[-1], TIGHT[-1])
"""One arrangement of each kind. Those in Go are left out, because their program must be built first."""

SHORT = ("--seconds", "0.2")

pytestmark = [pytest.mark.one_version, pytest.mark.timeout(300)]


def bench(assets: Path | None, *arguments: str) -> Any:
    assert assets
    command = (sys.executable, "-m", "bench", *arguments, "--output", "json")
    env = {**os.environ, "KUBEBUILDER_ASSETS": str(assets)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_bench_creates_measures_every_kind_of_arrangement(assets: Path | None, cluster: Cluster) -> None:
    names = (*ARRANGEMENTS, *([CLAIMS_OURS] if served(cluster) else []))
    only = [text for name in names for text in ("--only", name)]
    assert {*bench(assets, "creates", *SHORT, "--rounds", "1", "--namespaces", "1", *only)} == {*names}


def test_bench_scale_measures_pods_claims_and_slices(assets: Path | None) -> None:
    sizes = ("--namespaces", "1", "--pods", "20", "--claims", "10", "--slices", "2", "--events", "2")
    assert bench(assets, "scale", *SHORT, *sizes)


def test_bench_failover_kills_and_stops_the_leader(assets: Path | None) -> None:
    assert {*bench(assets, "failover", *SHORT, "--rounds", "1")} == {"killed", "stopped"}


def test_bench_teams_compares_the_memory_of_a_replica(assets: Path | None) -> None:
    assert {*bench(assets, "teams", "--teams", "1", "--namespaces", "2")} == {"without-teams", "teams"}
