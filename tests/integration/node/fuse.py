"""File systems in user space whose server has died, or does not answer: what asks them fails, or waits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, *, dead: bool) -> Iterator[None]:
    """Mount one at ``path``; skipped where that is not allowed."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    try:
        options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
        command = ("mount", "-i", "-t", "fuse", "-o", options, "none", path)
        done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=(server,))
        if done.returncode:
            pytest.skip(f"mount needs CAP_SYS_ADMIN: {done.stderr.strip()}")
        if dead:
            os.close(server)
        yield
    finally:
        if not dead:
            os.close(server)  # whoever waits for an answer gets an error
        subprocess.run(("umount", "--lazy", path), capture_output=True, check=False)
