"""Runs buildah with images and containers that only this build uses."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CannotBuild(Exception):
    """Raised if this machine cannot build the image. The message says what to do."""


CACHE = Path(os.environ.get("VCUDA_IMAGE_CACHE") or Path.home() / ".cache" / "vcuda-image")
"""The directory of buildah's images and containers, and of the log."""

LOG = CACHE / "build.log"


def run(*command: str | Path) -> str:
    """Run a command, and return its standard output. Its standard error is appended to the log.

    Raises CannotBuild if the command is missing or fails. Its output is then in the log, too.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with LOG.open("a", encoding="utf-8") as log:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        except FileNotFoundError:
            raise CannotBuild(f"{command[0]} was not found. Install Debian's package {command[0]}") from None
        if done.returncode:
            log.write(done.stdout)
            raise CannotBuild(f"{Path(command[0]).name} failed with status {done.returncode}. The output is in {LOG}")
    return done.stdout.strip()


def buildah(*arguments: str | Path) -> str:
    """Run buildah, and return its output. Raises CannotBuild if buildah is missing or fails."""
    return run("buildah", "--root", CACHE / "images", "--runroot", CACHE / "run", *arguments)


@contextmanager
def alone() -> Iterator[None]:
    """Return a context in which only this process uses the images. Containers left by a killed process are removed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LOG.write_text("", encoding="utf-8")
        buildah("rm", "--all")
        yield
