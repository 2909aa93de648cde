"""Fixtures for tests against scripted answers."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_double import ApiDouble
from tests.integration.fuzzing import Target, under_fire
from tests.integration.scripted import Script, serving, write_kubeconfig
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    """An API server that holds nothing yet, in this process."""
    return ApiDouble()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A webhook to be sent anything; so many files may be open here, too, as crowds of clients need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with under_fire(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
