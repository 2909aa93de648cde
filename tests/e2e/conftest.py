"""The fixtures of the e2e tests: one control plane for the whole test run, and a new namespace for each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.installation import Installation, account_of, controlling, installed, limited_team, tenant_of
from tests.e2e.quota_config import named_quota
from tests.processes import ControllerProcess
from tools.control_plane import ControlPlane, running_control_plane
from vcuda.kube import Kube


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow test files first. Otherwise one worker would run a slow file at the end while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def assets() -> Path | None:
    value = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(value).resolve() if value else None


@pytest.fixture(scope="session")
def control_plane(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The control plane of all tests, with default settings. If a test stops a component, it must start it again."""
    with running_control_plane(assets, tmp_path_factory.mktemp("control-plane")) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(control_plane: ControlPlane) -> Iterator[Cluster]:
    with administering(control_plane) as admin:
        yield admin


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.fresh_namespace() as name:
        yield name


@pytest.fixture
def kube(cluster: Cluster) -> Iterator[Kube]:
    with closing(Kube.connect(cluster.kubeconfig)) as kube:
        yield kube


@pytest.fixture
def path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps"


@pytest.fixture(scope="session")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """One running webhook replica for all tests, except for tests that would disturb others."""
    with installed(cluster, tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture
def team(installation: Installation) -> Iterator[Callable[[Json], str]]:
    """A function that creates a namespace with a quota entry. The entry is removed after the test."""
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(installation.team(entry))


@pytest.fixture(scope="module")
def controller(installation: Installation) -> Iterator[ControllerProcess]:
    with controlling(installation) as running:
        yield running


@pytest.fixture
def led_team(installation: Installation, controller: ControllerProcess) -> Iterator[Callable[[Json], str]]:
    """A function that creates a namespace with a quota entry. A controller runs, which recounts the ledger."""
    assert controller.process.poll() is None
    with ExitStack() as teardown:
        yield lambda entry: teardown.enter_context(limited_team(installation, entry))


@pytest.fixture(scope="module")
def account(cluster: Cluster) -> Iterator[Cluster]:
    """A client with the controller's ServiceAccount, whose rights are in controller-rbac.yaml."""
    with account_of(cluster, "controller-rbac.yaml", "vcuda-controller") as account:
        yield account


@pytest.fixture
def tenant(cluster: Cluster) -> Iterator[Callable[[str], Cluster]]:
    """A function that returns a client for a namespace. The client's only right is ClusterRole `edit` in it."""
    with ExitStack() as teardown:
        yield lambda namespace: teardown.enter_context(tenant_of(cluster, namespace))


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A webhook whose quota ConfigMap has the name in the manifests. It has no label, so /quota does not check it."""
    with installed(cluster, tmp_path_factory.mktemp("own"), quota=named_quota(cluster)) as installation:
        yield installation


@pytest.fixture
def create_node(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """A function that creates a node like `Cluster.create_node`, and returns its name. Deletes the node at the end."""
    with ExitStack() as teardown:

        def create(name: str, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None) -> str:
            cluster.create_node(name, labels, capacity)
            teardown.callback(cluster.delete_node, name)
            return name

        yield create


@pytest.fixture
def m40(create_node: Callable[..., str]) -> str:
    return create_node("gpu-m40-of-the-test", {MODEL: "M40"}, {"tencent.com/vcuda-core": "1600"})


@pytest.fixture
def scheduler(control_plane: ControlPlane) -> None:
    require(control_plane, "kube-scheduler")


@pytest.fixture
def controller_manager(control_plane: ControlPlane) -> None:
    require(control_plane, "kube-controller-manager")


def require(control_plane: ControlPlane, program: str) -> None:
    if program in control_plane.missing:
        pytest.skip(f"no {program} in KUBEBUILDER_ASSETS={control_plane.assets}")
