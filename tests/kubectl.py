"""Finds a kubectl that can render the manifests. If there is none, tests are skipped, and say what to install."""

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


class NoKubectl(Exception):
    """No kubectl that can render the manifests was found. The message says what to install."""


def find_kubectl(assets: str | None, path: str | None) -> str:
    """Return the path of a kubectl from ``assets`` (KUBEBUILDER_ASSETS), otherwise from ``path`` (PATH).

    Raises NoKubectl if there is none, or if it is too old to render the manifests.
    """
    found = shutil.which("kubectl", path=assets) if assets else None
    found = found or shutil.which("kubectl", path=path)
    if found is None:
        raise NoKubectl(f"no kubectl to render the manifests with. {WHAT_TO_DO}")
    version = version_of(found)
    matched = re.match(r"v1\.(\d+)", version)
    if matched is None or int(matched[1]) < FIRST_MINOR:
        raise NoKubectl(f"{found} ({version}) cannot render the manifests. {WHAT_TO_DO}")
    return found


def version_of(program: str) -> str:
    """Return the version that a kubectl reports, for example v1.37.2, or `no version` if it reports none."""
    command = (program, "version", "--client", "--output=yaml")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    matched = re.search(r"gitVersion: (\S+)", done.stdout)
    return matched[1] if matched else "no version"


@functools.cache
def _found() -> str | NoKubectl:
    """Return the path of kubectl, or the error. The result is cached, because every test of the manifests needs it."""
    try:
        return find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
    except NoKubectl as error:
        return error


def kubectl() -> str:
    """Return the path of kubectl. If there is none, skip the test. Only one test of test_manifests.py then fails."""
    found = _found()
    if isinstance(found, NoKubectl):
        pytest.skip(str(found), allow_module_level=True)
    return found
