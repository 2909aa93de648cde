"""Builds the single file of the plugin `kubectl gpuquota`, and a program python3 that has no other packages."""

import sys
from pathlib import Path

import pytest

from tools import plugin_file, release

DATE = 1_700_000_000


def write_plugin(target: Path, workplace: Path) -> Path:
    """Write the plugin's file, built from the last commit, into ``target``. Return its path."""
    if not (release.ROOT / ".git").exists():
        pytest.skip("no git repository: a release is made from a commit")
    release.source_of("HEAD", workplace)
    wheel = release.write_wheel(workplace, target, DATE)
    return plugin_file.write(wheel, (workplace / release.LOCK).read_text(), target, DATE)


def write_python(directory: Path) -> Path:
    """Write a program ``python3`` that cannot import the packages of this machine. Return its path."""
    python = directory / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    return python
