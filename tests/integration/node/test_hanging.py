"""The node agent waits only for a bounded time for processes that take very long to inspect."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest

from controller.garbage.node.agent import Action
from controller.garbage.node.fs import mount_number
from controller.garbage.node.in_use import ProcessScanner
from controller.garbage.node.names import Keep, KeepReason
from tests.integration.node import fuse
from tests.integration.node.disk import HOUR, Agent, Disk, need_root, uid

HOLD = """
import os, sys
path, how = sys.argv[1:]
os.chdir(path if how == "cwd" else "/")
held = os.open(path, os.O_PATH) if how != "cwd" else None  # opened in earnest it would wait itself
many = [os.dup(held) for _ in range(60 if how == "many times" else 0)]
print(flush=True)
sys.stdin.read()
"""


class Server(NamedTuple):
    """A FUSE server that does not answer: its mount point, and its file descriptor."""

    path: Path
    end: FileIO


@pytest.fixture
def server(disk: Disk) -> Iterator[Server]:
    need_root()
    path = disk.base / "tenant"
    path.mkdir()
    with fuse.mounted(path, dead=False) as end:
        yield Server(path, end)


@contextmanager
def held(path: Path, how: str, server: Server | None = None) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-c", HOLD, path, how)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if server and how == "cwd":
            fuse.let_in(server.end)
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate()


@pytest.mark.parametrize("how", ["open", "cwd"])
def test_files_on_another_mount_are_not_inspected(disk: Disk, agent: Agent, server: Server, how: str) -> None:
    disk.make(uid(1))
    agent.let_grace_pass()
    with held(server.path, how, server):
        assert agent.sweep()[uid(1)].verdict is Action.MOVED


def test_the_wait_for_a_file_on_a_hidden_mount_is_bounded(
    disk: Disk, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's mount was detached, so the agent cannot see that the file is outside the root, and must wait for its
    server.

    The server does not answer. So the file might be in any pod's directory, and all directories stay.
    """
    disk.make(uid(1))
    monkeypatch.setattr("controller.garbage.node.in_use.SCAN_TIMEOUT_SECONDS", 0.5)
    agent = Agent(disk, scanner=ProcessScanner())
    agent.let_grace_pass()
    with held(server.path, "open"):
        subprocess.run(("umount", "--lazy", server.path), check=True)
        assert agent.sweep()[uid(1)].keep == Keep(KeepReason.UNSEEN, "the scan of processes made no progress for 0.5 s")
        disk.clocks.advance(HOUR)
        assert agent.sweep()[uid(1)].keep == Keep(KeepReason.UNSEEN, "an earlier scan of the processes has not ended")
    assert disk.names() == {uid(1)}
    server.end.close()
    disk.clocks.advance(HOUR)
    while agent.sweep()[uid(1)].keep:  # the test sweeps until the blocked scan has ended
        disk.clocks.advance(HOUR)


def test_a_process_with_very_many_files_is_waited_for(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent inspects each file quickly. If it did not wait, such a process would prevent every removal."""
    disk.make(uid(1))
    monkeypatch.setattr("controller.garbage.node.in_use.SCAN_TIMEOUT_SECONDS", 1.5)
    agent = Agent(disk, scanner=ProcessScanner())
    agent.let_grace_pass()
    with held(Path("/"), "many times") as process:

        def slowly(info: str) -> int:
            time.sleep(0.05 * (f"/{process.pid}/" in info))
            return mount_number(info)

        monkeypatch.setattr("controller.garbage.node.in_use.mount_number", slowly)
        assert agent.sweep()[uid(1)].verdict is Action.MOVED
