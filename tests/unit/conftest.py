"""Fixtures of the unit tests. All replicas of a test share one API server double."""

from pathlib import Path

import pytest

from controller import registration
from controller.plugin.kubectl import Kubectl
from tests.api_double import ApiDouble
from tests.cleaner import Cleaner
from tests.gpuquota import Cluster
from tests.installed import Installed
from tests.replicas import Clock, Replica
from vcuda.kube import Kube


@pytest.fixture
def api() -> ApiDouble:
    return ApiDouble()


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the replicas. It advances only when they sleep."""
    return Clock()


@pytest.fixture
def replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    """Return one webhook replica. If the test also requests the fixture ``clock``, the replica uses this clock."""
    return _replica(api, request)


@pytest.fixture
def other(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    return _replica(api, request)


def _replica(api: ApiDouble, request: pytest.FixtureRequest) -> Replica:
    return Replica(api, request.getfixturevalue("clock") if "clock" in request.fixturenames else None)


@pytest.fixture
def cleaner(api: ApiDouble) -> Cleaner:
    """Return the controller's loop that removes stale allocations. Its watches have not listed anything yet."""
    return Cleaner(api)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory without a kubeconfig."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return a test double of a cluster, to which every kubeconfig connects."""
    cluster = Cluster()
    monkeypatch.setattr(Kubectl, "find", lambda *_: cluster)
    monkeypatch.setattr(Kube, "connect", lambda *_: cluster.kube)
    assert not (home / ".kube").exists()
    return cluster


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return tmp_path / "pods.yaml"


@pytest.fixture
def installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Return a test double of a cluster with a healthy installation, to which every kubeconfig connects."""
    found = Installed()
    monkeypatch.setattr(Kubectl, "find", lambda *_: found)
    monkeypatch.setattr(Kube, "connect", lambda *_: found.kube)
    monkeypatch.setattr(registration, "PAUSE_SECONDS", 0)
    assert not (home / ".kube").exists()
    return found
