"""``vcuda-controller run --ui-address``: what cannot be served is said at once, as bad input."""

from __future__ import annotations

import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.integration.scripted import write_kubeconfig

PROGRAM = Path(sysconfig.get_path("scripts"), "vcuda-controller")
BAD_INPUT = 2


def run(directory: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Run it beside no API server at all, which it does not get to ask."""
    kubeconfig = directory / "kubeconfig"
    write_kubeconfig(kubeconfig, "http://127.0.0.1:1", {"token": "letmein"})
    command: list[str | Path] = [
        PROGRAM,
        "run",
        "--kubeconfig",
        kubeconfig,
        "--status-address",
        "127.0.0.1:0",
        "--ui-address",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:", ":x"])
def test_what_is_no_address_is_bad_input(tmp_path: Path, address: str) -> None:
    done = run(tmp_path, address)
    assert (done.returncode, done.stdout) == (BAD_INPUT, "")
    assert f"Invalid value for --ui-address: {address!r} is not HOST:PORT." in done.stderr


def test_an_address_that_is_taken_is_bad_input(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        done = run(tmp_path, address)
    assert done.returncode == BAD_INPUT
    assert f"Invalid value for --ui-address: {address}: Address already in use." in done.stderr
