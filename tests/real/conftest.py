"""Fixtures of the tests on a real node. One cluster with the Helm chart serves the whole test run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, administering
from tests.real.node import ADDRESS, KUBELET_USER, PROXY_USER, Node, running_node
from tests.real.release import MEMBERS, QUOTA, TEAMS, Release
from tools.control_plane import ControlPlane, Settings, running_control_plane

USERS = ("tenant", KUBELET_USER, PROXY_USER)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    if "REAL_STATE" not in os.environ:
        pytest.skip("these tests need namespaces of their own: run them by `make real`")
    settings = Settings(users=USERS, own_identities=True, node_address=ADDRESS, startup_timeout=180)
    assets = Path(os.environ["KUBEBUILDER_ASSETS"])
    with running_control_plane(assets, tmp_path_factory.mktemp("plane"), settings) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    with administering(plane) as admin:
        yield admin


@pytest.fixture(scope="session")
def node(plane: ControlPlane, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    programs = [Path(os.environ[name]) for name in ("NODE_ASSETS", "NODE_TOOLS")]
    images = [Path(os.environ["IMAGE_ARCHIVE"])]
    with running_node(plane, cluster, tmp_path_factory.mktemp("node"), programs, images) as running:
        yield running


@pytest.fixture(scope="session")
def release(cluster: Cluster, node: Node, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The installed chart, whose webhooks are registered, and a quota for all namespaces of the tests."""
    assert node.kubelet.running
    for namespace in (*TEAMS, *MEMBERS):
        cluster.create_namespace(namespace)
    release = Release(cluster, tmp_path_factory.mktemp("release"))
    release.install()
    cluster.apply(QUOTA)
    release.await_enforced()
    return release
