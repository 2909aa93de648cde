"""Fixtures for tests against scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_double import ApiDouble
from tests.integration.scripted import Script, serving, write_kubeconfig
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    """An API server that holds nothing yet, in this process."""
    return ApiDouble()


@pytest.fixture
def script() -> Script:
    """Fill this with the answers of the test."""
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[str]:
    """The URL where the script is served."""
    with serving(script) as url:
        yield url


@pytest.fixture
def kube(server: str, tmp_path: Path) -> Iterator[Kube]:
    """A client of the scripted server."""
    kubeconfig = tmp_path / "kubeconfig"
    write_kubeconfig(kubeconfig, server, {"token": "letmein"})
    kube = Kube.connect(kubeconfig)
    yield kube
    kube.close()
