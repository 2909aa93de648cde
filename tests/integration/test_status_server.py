"""Health checks and metrics, on addresses of either family; one that cannot be had is bad input."""

from __future__ import annotations

import socket
import subprocess
import sysconfig
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from controller.status_server import serve_status
from tests.integration.scripted import write_kubeconfig

PROGRAM = Path(sysconfig.get_path("scripts"), "vcuda-controller")
BAD_INPUT = 2
COMMANDS = {"run": ["run"], "node": ["node", "--scheme", "gpu-manager", "--node", "gpu-7", "--pod-uid", "u"]}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_it_is_served_to_either_family(host: str) -> None:
    if ":" in host:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    port = serve_status((host, 0), CollectorRegistry(), healthy=lambda: None, ready=lambda: "not yet")
    shown = f"[{host}]" if ":" in host else host or "127.0.0.1"
    with urllib.request.urlopen(f"http://{shown}:{port}/healthz") as answer:
        assert (answer.status, answer.read()) == (200, b"ok\n")


def run(directory: Path, command: str, address: str) -> subprocess.CompletedProcess[str]:
    """Run it beside no API server at all, which it does not get to ask."""
    kubeconfig = directory / "kubeconfig"
    write_kubeconfig(kubeconfig, "http://127.0.0.1:1", {"token": "letmein"})
    flags = [*COMMANDS[command], "--kubeconfig", str(kubeconfig), "--status-address", address]
    return subprocess.run([PROGRAM, *flags], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:99999", "'127.0.0.1:99999' is not HOST:PORT."),
        ("127.0.0.1:²", "'127.0.0.1:²' is not HOST:PORT."),
        ("nowhere.invalid:8080", "nowhere.invalid:8080: "),
        ("192.0.2.1:8080", "192.0.2.1:8080: Cannot assign requested address."),
    ],
)
def test_an_address_that_cannot_be_had_is_bad_input(tmp_path: Path, command: str, address: str, says: str) -> None:
    done = run(tmp_path, command, address)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, "Traceback" in done.stderr) == (BAD_INPUT, False)
    assert last.startswith("Error: ")
    assert f"--status-address: {says}" in last
