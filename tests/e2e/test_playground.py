"""Tests of the playground, a control plane with simulated GPU nodes on this machine.

The tests run the commands that the playground prints, and stop it in every way. No files or processes may remain.
"""

import os
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.playground.programs import KWOK, PROGRAMS, find
from examples.playground.teams import ALL
from examples.playground.texts import COMMANDS
from tests.processes import OwnProcess, eventually

ROOT = Path(__file__).parents[2]
STEPS = ("Starting etcd", "Starting 6", "Installing", "Creating")

pytestmark = [pytest.mark.slow, pytest.mark.one_version, pytest.mark.timeout(400)]


class PlaygroundProcess(OwnProcess):
    """A playground with its files in directory ``scratch``.

    When it prints a line that begins with ``until``, it has started.
    """

    def __init__(self, scratch: Path, until: str, *flags: str, **env: str) -> None:
        self._until = until
        kept = {name: value for name in ("VCUDA_E2E_CACHE", "VCUDA_TOOLS_CACHE") if (value := os.environ.get(name))}
        command = (sys.executable, "-m", "examples.playground", *flags)
        super().__init__(command, {**kept, "TMPDIR": str(scratch), "PYTHONPATH": str(ROOT), **env})

    def await_start(self) -> None:
        # Each wait has its own timeout, so wait for each line of the output separately.
        for begin in (*STEPS, "The teams change their workloads"):
            self._await_line(begin)
            if begin == self._until:
                return

    def _await_line(self, begin: str) -> None:
        if self._out.first(lambda line: line.startswith(begin)) is None:
            raise RuntimeError(f"ended with status {self.process.wait()}:\n{self.output()}")

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()


@pytest.fixture
def scratch(assets: Path | None, tmp_path: Path) -> Iterator[Path]:
    """An empty directory for the playground's files. At the end it must be empty, and unused by any process."""
    cache = Path(os.environ.get("VCUDA_TOOLS_CACHE", Path.home() / ".cache/vcuda-tools"))
    found = find([str(assets), str(cache / f"kwok-{KWOK}"), os.environ["PATH"]])
    if missing := [program.name for program in PROGRAMS if program.name not in found]:
        pytest.skip(f"no {', '.join(missing)}: run `make e2e`, and tests/e2e/build-tools kwok")
    directory = tmp_path / "scratch"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []
    assert processes_in(directory) == []


def processes_in(directory: Path) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # the process has ended meanwhile
            continue
        if f"{directory}/" in command:
            found.append(command)
    return found


def printed_commands(output: str) -> tuple[str, list[str]]:
    """Return lines of the playground's output: those that set the environment, and the kubectl commands to try."""
    indented = [line.strip() for line in output.splitlines() if line.startswith("    ")]
    exports = "\n".join(line for line in indented if line.startswith("export "))
    return exports, [line for line in indented if line.startswith("kubectl ")]


def ready(namespace: str, pods: int) -> str:
    awaited = f"--for=jsonpath='{{.status.readyReplicas}}'={pods}"
    return f"kubectl -n {namespace} wait {awaited} deployment/app --timeout=50s"


def test_the_printed_commands_work_and_ctrl_c_leaves_nothing(scratch: Path, tmp_path: Path) -> None:
    with PlaygroundProcess(scratch, "The teams change their workloads") as playground:
        output = playground.output()
        exports, commands = printed_commands(output)
        assert commands == [command.typed for command in COMMANDS]
        usage, rejections, scale, why, edit, scale_member, member, free = commands
        editor = "sed -i 's/your-team: {quota: {T4: 2}}/your-team: {quota: {T4: 4}}/'"
        env = {**os.environ, "HOME": str(tmp_path), "KUBE_EDITOR": editor}

        def type_in(command: str) -> str:
            typed = ("sh", "-c", f"{exports}\n{command}")
            done = subprocess.run(typed, env=env, capture_output=True, text=True, check=False, timeout=60)
            return done.stdout + done.stderr

        assert {line.split()[0] for line in type_in(usage).splitlines()} >= {team.namespace for team in ALL}
        eventually(lambda: "exceeded quota: A100 in namespace team-vision" in type_in(rejections))
        assert "deployment.apps/app scaled" in type_in(scale)
        # The command shows the present decision at once, but rejections only after their Events are written.
        eventually(lambda: "0.5 cards of T4 must become free before the request fits" in type_in(why))
        eventually(lambda: "Rejected in the last hour" in type_in(why))
        assert "configmap/gpuquota edited" in type_in(edit)
        assert "condition met" in type_in(ready("your-team", 6))
        assert "deployment.apps/app scaled" in type_in(scale_member)
        assert "condition met" in type_in(ready("robotics-train", 3))
        eventually(lambda: "exceeded quota: T4 in team robotics" in type_in(rejections), lambda: type_in(rejections))
        eventually(lambda: "team robotics" in type_in(member), lambda: type_in(member))
        assert "deployment.apps/app scaled" in type_in(free)
        assert "condition met" in type_in(ready("robotics-train", 4))
        [page] = [line.strip() for line in output.splitlines() if line.startswith("    http://")]
        with urllib.request.urlopen(urllib.parse.urljoin(page, "usage.json")) as answer:  # noqa: S310  # our own page
            assert b"team-vision" in answer.read()
        assert not (tmp_path / ".kube").exists()
        assert len(processes_in(scratch)) >= 8  # the fixture checks later that all of these processes have ended
        assert playground.stop(signal.SIGINT) == 0


def test_sigterm_during_the_start_leaves_nothing(scratch: Path) -> None:
    with PlaygroundProcess(scratch, "Starting etcd") as playground:
        assert playground.stop(signal.SIGTERM) == 130
