"""Processes that hold files of a server that does not answer, or very many: to look at them takes long, or for ever."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import pytest

from controller.node.agent import Action, DirectoryOutcome
from controller.node.fs import mount_number
from controller.node.in_use import ProcessScanner
from controller.node.names import Keep, KeepReason
from tests.integration.node import fuse
from tests.integration.node.disk import GRACE, HOUR, Agent, Disk, need_root, uid

SOON = 10.0
"""Seconds: far less than the server would take."""

HOLD = """
import os, sys
path, how = sys.argv[1:]
os.chdir(path if how == "cwd" else "/")
held = os.open(path, os.O_PATH) if how == "open" else None  # opened in earnest it would wait itself
print(flush=True)
sys.stdin.read()
"""

HOLD_MANY = """
import os, sys
held = os.open("/", os.O_RDONLY)
for _ in range(int(sys.argv[1])):
    os.dup(held)
print(flush=True)
sys.stdin.read()
"""


class Server(NamedTuple):
    """One that does not answer: where it is mounted, and its own end."""

    path: Path
    end: FileIO


@pytest.fixture
def server(disk: Disk) -> Iterator[Server]:
    """A server, beside the root."""
    need_root()
    path = disk.base / "tenant"
    path.mkdir()
    with fuse.mounted(path, dead=False) as end:
        yield Server(path, end)


@contextmanager
def held(server: Server, how: str) -> Iterator[None]:
    """Another process has the server's root open, or as its working directory."""
    command = (sys.executable, "-c", HOLD, server.path, how)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        if how == "cwd":
            fuse.let_in(server.end)
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another process has so much open that to look at it takes three seconds, though each file is told soon."""
    command = (sys.executable, "-c", HOLD_MANY, "60")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()

        def slowly(info: str) -> int:
            if f"/{process.pid}/" in info:
                time.sleep(0.05)
            return mount_number(info)

        monkeypatch.setattr("controller.node.in_use.mount_number", slowly)
        yield
        process.communicate()


def swept(agent: Agent, seconds: float = SOON) -> Mapping[str, DirectoryOutcome]:
    """What a sweep says, which must be over so soon."""
    began = time.monotonic()
    said = agent.sweep()
    assert time.monotonic() - began < seconds
    return said


@pytest.mark.parametrize("how", ["open", "cwd"])
def test_what_lies_on_another_mount_is_not_asked(disk: Disk, agent: Agent, server: Server, how: str) -> None:
    disk.make(uid(1))
    agent.let_grace_pass()
    with held(server, how):
        assert swept(agent)[uid(1)].verdict is Action.MOVED


def test_what_lies_on_a_mount_out_of_sight_is_waited_for_so_long_and_no_more(disk: Disk, server: Server) -> None:
    """It might be a file of the root's, so everything stays until it is known; a stop does not wait at all."""
    disk.make(uid(1))
    agent = Agent(disk, scanner=ProcessScanner(timeout=0.5))
    agent.let_grace_pass()
    with held(server, "open"):
        subprocess.run(("umount", "--lazy", server.path), check=True)
        assert swept(agent)[uid(1)].keep == Keep(KeepReason.UNSEEN, "nothing has moved for 0.5 s")
        disk.clocks.advance(HOUR)
        assert swept(agent)[uid(1)].keep == Keep(KeepReason.UNSEEN, "an earlier look has not ended")
        impatient = Agent(disk, scanner=ProcessScanner(timeout=HOUR))
        swept(impatient)
        disk.clocks.advance(2 * GRACE)
        began = time.monotonic()
        assert impatient.sweep(stopping=lambda: time.monotonic() - began > 0.5) == {}
        assert time.monotonic() - began < SOON
    assert disk.names() == {uid(1)}
    server.end.close()
    disk.clocks.advance(HOUR)
    deadline = time.monotonic() + SOON
    while swept(agent)[uid(1)].keep and time.monotonic() < deadline:
        disk.clocks.advance(HOUR)
    assert disk.names() == set(), "it was known again"


def test_processes_that_hold_very_much_are_waited_for(disk: Disk, many: None) -> None:  # noqa: ARG001
    """Else anyone who opens enough would see to it that nothing goes."""
    disk.make(uid(1))
    agent = Agent(disk, scanner=ProcessScanner(timeout=1.5))
    agent.let_grace_pass()
    assert swept(agent)[uid(1)].verdict is Action.MOVED
