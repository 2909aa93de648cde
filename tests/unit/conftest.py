"""Fixtures for tests beside one API server double, which replicas share."""

from pathlib import Path

import pytest

from controller.plugin.kubectl import Kubectl
from tests.api_double import ApiDouble
from tests.cleaner import Cleaner
from tests.gpuquota import Cluster
from tests.replicas import Clock, Replica
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    """Return an API server that holds nothing yet."""
    return ApiDouble()


@pytest.fixture
def clock() -> Clock:
    """Return the replicas' time, which passes by sleeping only."""
    return Clock()


@pytest.fixture
def replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    """Return one webhook replica, with the test's clock if it has one."""
    return _replica(api, request)


@pytest.fixture
def other(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    """Return another webhook replica, beside the first."""
    return _replica(api, request)


def _replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    return Replica(api, request.getfixturevalue("clock") if "clock" in request.fixturenames else None)


@pytest.fixture
def cleaner(api: ApiDouble) -> Cleaner:
    """Return the loop that removes stale allocations, which has seen nothing yet."""
    return Cleaner(api)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without a kubeconfig."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return a cluster that is reached whatever the kubeconfig says."""
    cluster = Cluster()
    monkeypatch.setattr(Kubectl, "find", lambda *_: cluster)
    monkeypatch.setattr(Kube, "connect", lambda *_: cluster.kube)
    assert not (home / ".kube").exists()
    return cluster


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "pods.yaml"
