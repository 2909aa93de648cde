"""Tests of ``python -m examples.demo``, as ``make demo`` runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo

pytestmark = pytest.mark.slow

ROOT = Path(demo.__file__).parents[1]


@pytest.fixture(scope="module")
def output() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def rows(output: str) -> dict[str, list[str]]:
    """Return the rows of the printed table. A row is the line of a pod or claim, and the indented lines below it."""
    table = output.partition("NAME ")[2].splitlines()[1:]
    found: dict[str, list[str]] = {}
    for line in table[: table.index("")]:
        if line.startswith(" "):
            found[next(reversed(found))].append(line.strip())
        else:
            found[line.split()[0]] = [line]
    return found


FULL = "P100 in namespace team-a, requested: 1 card, used: 1 (1 pending), limited: 1, 1 more needed"
REMOVED = "tencent.com/predicate-time, tencent.com/predicate-gpu-idx-0, tencent.com/gpu-assigned"
TABLE = {
    "team-a/whole-card": ("1 card admitted M40", "the first in the namespace's quota"),
    "team-a/half-a-card": ("0.5 cards, 4096 MiB admitted M40", "the first in the namespace's quota"),
    "team-a/p100-please": ("1 card admitted P100", "the only possible model"),
    "team-a/p100-again": ("1 card rejected", f"exceeded quota: {FULL}"),
    "team-a/too-many": ("3 cards rejected", "can never fit"),
    "team-a/card-and-a-half": ("1.5 cards rejected", "write 100 or 200"),
    "team-a/copied": ("0.2 cards, 2048 MiB admitted M40", f"the webhook removes allocation records: {REMOVED}"),
    "team-b/picks-its-node": (
        "0.5 cards, 20480 MiB admitted A100",
        "the webhook replaces the pod's nodeName by a required node affinity",
    ),
    "team-b/mig-slice": ("0.5 cards, 20480 MiB admitted A100", "the only possible model"),
    "team-b/claimed-card": ("1 card admitted A100", "the only possible model, 1 card of 2 cards free"),
    "team-b/who-knows": ("rejected", "`nvidia.com/gpu.shared: {cards: 1}`"),
    "team-c/beyond-a-warning": ("2 cards admitted M40", "the object is admitted, because this quota only warns"),
    "vision-train/shares": ("1 card admitted M40", "the only possible model"),
    "vision-dev-1/two-cards": (
        "2 cards rejected",
        "M40 in team vision, requested: 2 cards, used: 1 (this namespace 0, others 1), limited: 2, 1 more needed",
    ),
    "vision-dev-1/last-card": ("1 card admitted M40", "the only possible model"),
    "sandbox/free-as-air": ("8 cards not limited", ""),
    "team-a/web-server": ("no GPU", ""),
}


@pytest.mark.parametrize("pod", TABLE)
def test_the_table_shows_the_outcome_of_each_pod_and_the_reason(output: str, pod: str) -> None:
    (decision, why), (line, *stories) = TABLE[pod], rows(output)[pod]
    assert line.split()[1:] == decision.split()
    assert why in " ".join(stories)


def test_the_output_explains_each_step_and_fits_a_terminal(output: str) -> None:
    lines = output.splitlines()
    assert lines[0].startswith("Starting vcuda-webhook serve --standalone --quota manifests/examples/gpuquota.yaml")
    assert lines[1].startswith("It serves https://127.0.0.1:")
    assert "team-a may use 2 cards of M40, 1 card of P100, in pool public" in lines
    assert "the namespaces of team vision (vision-train, vision-dev-*) together may use 2 cards of M40" in lines
    assert lines[-1].startswith("17 pods and claims: 10 admitted, ")
    assert max(map(len, lines)) <= 140


def test_the_demo_leaves_no_server_running(output: str) -> None:
    port = int(output.splitlines()[1].partition(",")[0].rpartition(":")[2])
    listening = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert ["0100007F", f"{port:04X}", "0A"] not in [[*local.split(":"), state] for local, _, state in listening]


PYTHON = """#!/bin/sh
echo "python $*" >>"{log}"
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  printf '#!/bin/sh\\necho "%s $*" >>"{log}"\\n' pip >"$3/bin/pip"
  printf '#!/bin/sh\\necho "%s $*" >>"{log}"\\n' demo >"$3/bin/python"
  chmod +x "$3/bin/pip" "$3/bin/python"
fi
"""


def make_demo(directory: Path) -> tuple[list[str], list[str]]:
    """Run `make demo` with a program python that only logs its calls. Return the lines of the output and the log."""
    log, python = directory / "log", directory / "python3"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)
    log.unlink(missing_ok=True)
    command = ("make", "demo", f"VENV={directory / 'venv'}", f"PYTHON={python}")
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines(), log.read_text().splitlines()


def test_make_demo_says_what_it_installs_and_how_long_it_took_and_installs_only_the_programs(tmp_path: Path) -> None:
    shown, called = make_demo(tmp_path)
    assert shown[0].startswith(f"Installing vcuda quota into {tmp_path / 'venv'}. This is necessary only once")
    assert [line.split()[0] for line in shown[1:4]] == ["1.", "2.", "3."]
    assert re.fullmatch(r"Installed in \d+ s\.", shown[4])
    assert [call.split()[0] for call in called] == ["python", "python", "pip", "pip", "demo"]
    assert "--requirement requirements.lock" in called[2]
    assert (called[3].endswith("--no-deps --editable ."), called[4]) == (True, "demo -m examples.demo")


def test_the_second_make_demo_installs_nothing(tmp_path: Path) -> None:
    make_demo(tmp_path)
    assert make_demo(tmp_path) == ([], ["demo -m examples.demo"])
