"""`vcuda-webhook check` judges manifests with the grants (quota for a limited time) of the current time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.reviews import card_pod


@pytest.mark.parametrize(("until", "decision"), [("2999-12-31", "admitted"), ("2000-01-01", "refused")])
@pytest.mark.parametrize("environment", [{}, {"PYTHONTZPATH": ""}], ids=["zones of the system", "zones of the package"])
def test_check_decides_by_the_present_grants(
    tmp_path: Path, until: str, decision: str, environment: dict[str, str]
) -> None:
    """The image has no time zone database, so the package must have one."""
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
