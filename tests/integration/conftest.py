"""Fixtures for tests against servers with scripted answers, and for fuzz tests of the webhook."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_double import ApiDouble
from tests.integration.fuzzing import Target, under_fire
from tests.integration.scripted import Script, serving, write_kubeconfig
from tests.rendered import BASE, Json, rendered
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    return ApiDouble()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A running webhook to which tests send arbitrary input.

    The limit of open files of the test process is raised, because some tests open thousands of connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with under_fire(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def server(script: Script) -> Iterator[str]:
    with serving(script) as url:
        yield url


@pytest.fixture
def kubeconfig(server: str, tmp_path: Path) -> Path:
    write_kubeconfig(tmp_path / "kubeconfig", server, {"token": "letmein"})
    return tmp_path / "kubeconfig"


@pytest.fixture
def kube(kubeconfig: Path) -> Iterator[Kube]:
    kube = Kube.connect(kubeconfig)
    yield kube
    kube.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory for certificates, which does not exist yet."""
    return tmp_path / "certs"


@pytest.fixture
def base() -> list[Json]:
    return rendered(BASE)
