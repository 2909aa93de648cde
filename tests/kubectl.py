"""The kubectl that renders the manifests, and what to install where there is none that can."""

import functools
import os
import re
import shutil
import subprocess

import pytest

FIRST_MINOR = 30
"""That of the oldest Kubernetes that is supported: with an older kubectl nothing here is tried."""

WHAT_TO_DO = (
    f"Install kubectl 1.{FIRST_MINOR} or later (https://kubernetes.io/docs/tasks/tools), or set KUBEBUILDER_ASSETS to "
    "what tests/e2e/build-control-plane prints"
)


class NoKubectl(Exception):
    """No kubectl can render the manifests; the message says what to install."""


def find_kubectl(assets: str | None, path: str | None) -> str:
    """The kubectl in ``assets`` (as KUBEBUILDER_ASSETS), else the one on ``path`` (as PATH).

    Raises NoKubectl where there is none, or where it is too old to render the manifests.
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
    """The release that a kubectl says it is of, such as v1.37.2; `no version` where it says none."""
    command = (program, "version", "--client", "--output=yaml")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    matched = re.search(r"gitVersion: (\S+)", done.stdout)
    return matched[1] if matched else "no version"


@functools.cache
def _found() -> str | NoKubectl:
    """What was found, looked for once: a missing kubectl is asked for by every test of the manifests."""
    try:
        return find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
    except NoKubectl as error:
        return error


def kubectl() -> str:
    """The kubectl of KUBEBUILDER_ASSETS or PATH. Where none can render, the test is skipped: one fails for them all."""
    found = _found()
    if isinstance(found, NoKubectl):
        pytest.skip(str(found), allow_module_level=True)
    return found
