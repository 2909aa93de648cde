"""One control plane for the whole run, a fresh namespace for each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.installation import Installation, account_of, controlling, installed, limited_team, tenant_of
from tests.e2e.quota_config import named_quota
from tests.processes import ControllerProcess
from tools.control_plane import ControlPlane, running_control_plane
from vcuda.kube import Kube


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: where several run at once, none is left alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def assets() -> Path | None:
    value = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(value).resolve() if value else None


@pytest.fixture(scope="session")
def control_plane(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane with default settings. Who stops a component starts it again."""
    with running_control_plane(assets, tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(control_plane: ControlPlane) -> Iterator[Cluster]:
    """The control plane's API as admin."""
    with administering(control_plane) as admin:
        yield admin


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace, deleted with its pods afterwards."""
    with cluster.fresh_namespace() as name:
        yield name


@pytest.fixture
def kube(cluster: Cluster) -> Iterator[Kube]:
    """Our client, with the admin's rights."""
    with closing(Kube.connect(cluster.kubeconfig)) as kube:
        yield kube


@pytest.fixture
def path(namespace: str) -> str:
    """The ConfigMaps of a fresh namespace."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture(scope="session")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """One replica of the webhook, which every test that breaks nothing shares."""
    with installed(cluster, tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture
def team(installation: Installation) -> Iterator[Callable[[Json], str]]:
    """Call it with an entry of the quota: a fresh enforced namespace that is held to it until the test ends."""
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(installation.team(entry))


@pytest.fixture(scope="module")
def controller(installation: Installation) -> Iterator[ControllerProcess]:
    with controlling(installation) as running:
        yield running


@pytest.fixture
def led_team(installation: Installation, controller: ControllerProcess) -> Iterator[Callable[[Json], str]]:
    """``team`` with a controller, which has labelled the namespace and looks after its ledger."""
    assert controller.process.poll() is None
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(limited_team(installation, entry))


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """The API as the controller's ServiceAccount, with what the manifest gives it."""
    with account_of(cluster, "controller-rbac.yaml", "vcuda-controller") as account:
        yield account


@pytest.fixture
def tenant(cluster: Cluster) -> Iterator[Callable[[str], Cluster]]:
    """Call it with a namespace: the API as one who has ClusterRole edit there, and no other right."""
    with ExitStack() as teardown:
        yield lambda namespace: teardown.enter_context(tenant_of(cluster, namespace))


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """The webhook on the quota ConfigMap that the manifest names, whose edits are not checked."""
    with installed(cluster, tmp_path_factory.mktemp("own"), quota=named_quota(cluster)) as installation:
        yield installation


@pytest.fixture
def create_node(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """``Cluster.create_node`` that returns the name, for nodes that are deleted after the test."""
    with ExitStack() as teardown:

        def create(name: str, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None) -> str:
            cluster.create_node(name, labels, capacity)
            teardown.callback(cluster.delete_node, name)
            return name

        yield create


@pytest.fixture
def scheduler(control_plane: ControlPlane) -> None:
    """For tests that need the scheduler: skipped, saying so, where the binaries lack it."""
    require(control_plane, "kube-scheduler")


@pytest.fixture
def controller_manager(control_plane: ControlPlane) -> None:
    """For tests that need the controller manager: skipped, saying so, where the binaries lack it."""
    require(control_plane, "kube-controller-manager")


def require(control_plane: ControlPlane, program: str) -> None:
    """Skip the test where the binaries lack ``program``."""
    if program in control_plane.missing:
        pytest.skip(f"no {program} in KUBEBUILDER_ASSETS={control_plane.assets}")
