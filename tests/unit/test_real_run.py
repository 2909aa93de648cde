"""`make real` on a machine that cannot run a node."""

import shutil
import subprocess
from pathlib import Path

from tests.rendered import MANIFESTS

RUN = MANIFESTS.parent / "tests" / "real" / "run"


def test_a_machine_that_cannot_run_a_node_is_told_why_in_one_line(tmp_path: Path) -> None:
    """The script finds no containerd in this PATH, even on a machine that has it."""
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    done = subprocess.run((RUN,), env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    assert line.startswith("tests/real: skipped: ")
    assert "root" in line or "apt-get install containerd" in line
