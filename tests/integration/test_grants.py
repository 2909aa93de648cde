"""Grants in the commands of the webhook: a server follows the clock, and `check` decides by the present time."""

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.reviews import Json, card_pod
from tests.processes import serving
from tests.waiting import PATIENT

LASTS = 3.0


def utc(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def first_time(admit: Callable[[], Json], *, allowed: bool) -> float:
    """Return when a pod got this answer first."""
    deadline = time.monotonic() + PATIENT
    while time.monotonic() < deadline:
        before = time.time()
        if admit()["allowed"] == allowed:
            return before
    raise AssertionError(f"no pod was {'admitted' if allowed else 'rejected'}")


def test_a_server_admits_from_the_begin_of_a_grant_until_its_end(tmp_path: Path) -> None:
    quota = tmp_path / "gpuquota.yaml"
    begin = float(int(time.time()) + 8)
    grant = {"M40": 100_000, "from": utc(begin), "until": utc(begin + LASTS)}
    quota.write_text(json.dumps({"team-a": {"quota": {}, "grants": [grant]}}))
    with serving("--standalone", "--quota", quota) as server:
        pods = (card_pod(f"train-{number}", "team-a") for number in range(1_000_000))

        def admit() -> Json:
            return server.admit(next(pods))

        refused = admit()
        assert time.time() < begin
        assert f"a grant adds 100000 cards of M40 at {utc(begin)[:10]}" in refused["status"]["message"]
        assert first_time(admit, allowed=True) >= begin - 0.5
        assert first_time(admit, allowed=False) >= begin + LASTS - 0.5
        assert time.time() < begin + LASTS + PATIENT


@pytest.mark.parametrize(("until", "decision"), [("2999-12-31", "admitted"), ("2000-01-01", "refused")])
@pytest.mark.parametrize("environment", [{}, {"PYTHONTZPATH": ""}], ids=["zones of the system", "zones of the package"])
def test_check_decides_by_the_grants_of_now(
    tmp_path: Path, until: str, decision: str, environment: dict[str, str]
) -> None:
    """Also in an image without a database of time zones."""
    quota, pod = tmp_path / "gpuquota.yaml", tmp_path / "pod.yaml"
    entry = {"quota": {"M40": 1}, "time_zone": "Europe/Berlin", "grants": [{"M40": 1, "until": until}]}
    quota.write_text(json.dumps({"team-a": entry}))
    pod.write_text(json.dumps(card_pod("train", "team-a", cards=2)))
    command = (Path(sys.executable).parent / "vcuda-webhook", "check", "--quota", quota, "-o", "json", pod)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    [row] = json.loads(done.stdout)["objects"]
    assert (row["decision"], done.stderr) == (decision, "")
    if decision == "admitted":
        assert "a grant ends at 3000-01-01 00:00 Europe/Berlin" in row["reason"]
