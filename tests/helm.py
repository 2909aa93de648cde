"""Runs helm with the chart. Tests that need helm are skipped, with a hint, if it is not installed."""

import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rendered import MANIFESTS

CHART = MANIFESTS / "chart"
WHAT_TO_DO = "run tests/e2e/build-tools, and put the directory that it prints on PATH"
NEWEST = "1.37.2"
"""The Kubernetes version for which templates are rendered. Helm built by `go install` has an older default."""
APIS = ("cert-manager.io/v1", "monitoring.coreos.com/v1")
"""The APIs of other projects that helm must assume to be installed, because components of the chart use them."""


@functools.cache
def program(name: str = "helm") -> str:
    """Return the path of helm 4, or of another program. If the program is missing, the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH: {WHAT_TO_DO}")
    return found


def helm(*arguments: str | Path, name: str = "helm") -> subprocess.CompletedProcess[str]:
    command = (program(name), *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def templated(
    settings: Sequence[str] = (), *, chart: Path = CHART, name: str = "helm", apis: Sequence[str] = APIS
) -> subprocess.CompletedProcess[str]:
    options = [
        f"--kube-version={NEWEST}",
        *(f"--api-versions={each}" for each in apis),
        *(f"--set={each}" for each in settings),
    ]
    return helm("template", "vcuda-quota", chart, "--namespace=kube-system", *options, name=name)
