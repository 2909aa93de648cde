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
    """Begin with the slow files, so that no worker is left with one of them at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def assets() -> Path | None:
    value = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(value).resolve() if value else None


@pytest.fixture(scope="session")
def control_plane(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Run a control plane with default settings. A test that stops a component must start it again."""
    with running_control_plane(assets, tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(control_plane: ControlPlane) -> Iterator[Cluster]:
    """Connect to the control plane's API as admin."""
    with administering(control_plane) as admin:
        yield admin


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """Create a namespace. It is deleted with its pods at the end."""
    with cluster.fresh_namespace() as name:
        yield name


@pytest.fixture
def kube(cluster: Cluster) -> Iterator[Kube]:
    """Our client, with the admin's rights."""
    with closing(Kube.connect(cluster.kubeconfig)) as kube:
        yield kube


@pytest.fixture
def path(namespace: str) -> str:
    """Return the path of the ConfigMaps of a fresh namespace."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture(scope="session")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Run one replica of the webhook, shared by all tests that do not break it."""
    with installed(cluster, tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture
def team(installation: Installation) -> Iterator[Callable[[Json], str]]:
    """Return a function that creates an enforced namespace with an entry in the quota. The entry lasts until the test
    ends.
    """
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(installation.team(entry))


@pytest.fixture(scope="module")
def controller(installation: Installation) -> Iterator[ControllerProcess]:
    with controlling(installation) as running:
        yield running


@pytest.fixture
def led_team(installation: Installation, controller: ControllerProcess) -> Iterator[Callable[[Json], str]]:
    """Return ``team`` for an installation whose controller has labelled the namespace and settles its ledger."""
    assert controller.process.poll() is None
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(limited_team(installation, entry))


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """Connect to the API as the controller's ServiceAccount, with the rights of the manifest."""
    with account_of(cluster, "controller-rbac.yaml", "vcuda-controller") as account:
        yield account


@pytest.fixture
def tenant(cluster: Cluster) -> Iterator[Callable[[str], Cluster]]:
    """Return a function that connects to the API as a user with only ClusterRole edit in a namespace."""
    with ExitStack() as teardown:
        yield lambda namespace: teardown.enter_context(tenant_of(cluster, namespace))


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Run the webhook with the quota ConfigMap that the manifest names. Its edits are not checked."""
    with installed(cluster, tmp_path_factory.mktemp("own"), quota=named_quota(cluster)) as installation:
        yield installation


@pytest.fixture
def create_node(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Return ``Cluster.create_node``, but it returns the name, and the nodes are deleted after the test."""
    with ExitStack() as teardown:

        def create(name: str, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None) -> str:
            cluster.create_node(name, labels, capacity)
            teardown.callback(cluster.delete_node, name)
            return name

        yield create


@pytest.fixture
def scheduler(control_plane: ControlPlane) -> None:
    """Skip the test if there is no scheduler."""
    require(control_plane, "kube-scheduler")


@pytest.fixture
def controller_manager(control_plane: ControlPlane) -> None:
    """Skip the test if there is no controller manager."""
    require(control_plane, "kube-controller-manager")


def require(control_plane: ControlPlane, program: str) -> None:
    """Skip the test, with a message, if the binaries have no ``program``."""
    if program in control_plane.missing:
        pytest.skip(f"no {program} in KUBEBUILDER_ASSETS={control_plane.assets}")
