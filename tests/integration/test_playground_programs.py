"""Tests of ``python -m examples.playground`` on a machine where programs are missing or must be built first."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.playground.play import PartEnded, check_running
from examples.playground.programs import PROGRAMS, ROOT
from tests.processes import OwnProcess, eventually
from tools.component import Component

NEEDED = ("bash", "cut", "env", "flock", "grep", "head", "mkdir", "rm", "sed", "setpriv", "sort")
"""The programs that the build scripts run before they look for Go."""

PLAYGROUND = (sys.executable, "-m", "examples.playground")


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a machine that has neither Go nor programs of earlier builds."""
    programs, scratch = tmp_path / "bin", tmp_path / "scratch"
    programs.mkdir()
    scratch.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found, name
        (programs / name).symlink_to(found)
    caches = {name: str(tmp_path / "cache") for name in ("VCUDA_E2E_CACHE", "VCUDA_TOOLS_CACHE")}
    return {"PATH": str(programs), "HOME": str(tmp_path), "TMPDIR": str(scratch), **caches}


def scratch_of(machine: Mapping[str, str]) -> list[Path]:
    return list(Path(machine["TMPDIR"]).iterdir())


def test_without_go_every_missing_program_is_named_in_one_message(machine: dict[str, str]) -> None:
    done = subprocess.run(PLAYGROUND, cwd=ROOT, env=machine, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    first, *others = done.stderr.splitlines()
    assert first.startswith("Error: Some programs are missing. Install Go 1.26 or later")
    names = [program.name for program in PROGRAMS if program.name != "setpriv"]
    assert [line.strip().partition(":")[0] for line in others] == names
    assert not scratch_of(machine)


class Building(OwnProcess):
    """A running playground that is still building its programs."""

    def await_start(self) -> None:
        self._out.first(lambda line: "Preparing the programs" in line)


@pytest.mark.parametrize(
    "signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)], ids=["one", "three at once"]
)
def test_signals_also_end_the_build(
    machine: dict[str, str], tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    started = tmp_path / "started"
    go = Path(machine["PATH"]) / "go"
    go.write_text(f"#!{shutil.which('bash')}\necho $$ >{started}\nexec {shutil.which('sleep')} 600\n")
    go.chmod(0o755)
    command = ("env", "-u", "KUBEBUILDER_ASSETS", *PLAYGROUND)
    with Building(command, {**machine, "PYTHONPATH": str(ROOT)}) as playground:
        compiler = eventually(lambda: started.exists() and int(started.read_text() or 0))
        for number in signals:
            playground.process.send_signal(number)
        assert playground.wait() == 130
    eventually(lambda: not is_alive(compiler), lambda: f"process {compiler} is left")
    assert not scratch_of(machine)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def test_a_part_that_ends_by_itself_ends_the_playground_with_its_log(tmp_path: Path) -> None:
    part = Component("part", ("sh", "-c", "echo out of luck; exit 3"), tmp_path / "log", lambda: True, 10)
    part.launch()
    eventually(lambda: not part.running)
    with pytest.raises(PartEnded, match=r"(?s)part ended with exit status 3\..*out of luck"):
        check_running([part])
