"""Builds and runs the webhook in Go that allows every request."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.servers import PIN, Server

SOURCE = Path(__file__).with_name("webhook.go")


class BuildFailed(Exception):
    """Go is installed but cannot build the webhook. The message is the output of ``go build``."""


def installed() -> bool:
    return shutil.which("go") is not None


def build(directory: Path) -> Path:
    """Build the webhook in Go into this directory, and return the path of the program. Raises BuildFailed."""
    program = directory / "webhook"
    # These settings make Go use its installed version, and not download another version of Go.
    command = ("env", "GOTOOLCHAIN=local", "GOFLAGS=", "GOWORK=off", "go", "build", "-o", str(program), str(SOURCE))
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildFailed(f"go build {SOURCE}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return program


@contextmanager
def serving(program: Path, certificates: Path, *, pins: bool) -> Iterator[Server]:
    """Run the webhook in Go, which allows every request. If ``pins`` is true, it patches every pod by `PIN`."""
    flags = ("-cert-dir", str(certificates), *(("-pin", PIN.decode()) if pins else ()))
    process = subprocess.Popen((str(program), *flags), stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{program} ended with exit status {process.wait()} before it served requests")
        yield Server(url, process.pid, url)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()
