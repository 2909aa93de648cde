"""Finds a kubectl that can render the manifests. Without it, tests are skipped and say what to install."""

import functools
import os
import re
import shutil
import subprocess

import pytest

FIRST_MINOR = 30
"""The minor version of the oldest supported Kubernetes. An older kubectl is not used."""

WHAT_TO_DO = (
    f"Install kubectl 1.{FIRST_MINOR} or later (https://kubernetes.io/docs/tasks/tools), or set KUBEBUILDER_ASSETS to "
    "what tests/e2e/build-control-plane prints"
)


@functools.cache
def find_kubectl() -> tuple[str, str]:
    """Return the path of a kubectl in KUBEBUILDER_ASSETS or PATH, and why it is unusable (empty if it is usable)."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    found = (shutil.which("kubectl", path=assets) if assets else None) or shutil.which("kubectl")
    if found is None:
        return "", "no kubectl to render the manifests with"
    command = (found, "version", "--client", "--output=yaml")
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    version = re.search(r"gitVersion: v1\.(\d+)", told)
    usable = version is not None and int(version[1]) >= FIRST_MINOR
    return found, "" if usable else f"{found} is too old to render the manifests: {told}"


def kubectl() -> str:
    """Return the path of kubectl, or skip the test. If kubectl is missing, only one test of test_manifests.py fails."""
    found, problem = find_kubectl()
    if problem:
        pytest.skip(f"{problem}. {WHAT_TO_DO}", allow_module_level=True)
    return found
