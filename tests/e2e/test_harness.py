"""The harness itself: what the other end-to-end tests stand on."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.rest import warning_text
from tests.integration.reviews import gpu_pod
from tools.component import StartupError
from tools.control_plane import NoControlPlane, Settings, lay_out, prepare, running_control_plane


def test_a_state_that_does_not_come_is_a_timeout_that_shows_the_object(cluster: Cluster, namespace: str) -> None:
    cluster.create(gpu_pod("idle", namespace, {}))
    with pytest.raises(TimeoutError, match='"phase": "Pending"'):
        cluster.wait_pod(namespace, "idle", lambda one: one["status"]["phase"] == "Running", timeout=0.2)


def test_a_server_that_can_not_start_shows_its_log(assets: Path | None, tmp_path: Path) -> None:
    broken = Settings(apiserver_flags=("--no-such-flag",))
    said = pytest.raises(StartupError, match=r"(?s)kube-apiserver: exit status 1;.*unknown flag: --no-such-flag")
    with said, running_control_plane(assets, tmp_path, broken):
        pass
    assert not (tmp_path / "etcd").exists()


@pytest.mark.parametrize("present", [(), ("etcd",)], ids=["none", "etcd alone"])
def test_without_binaries_it_is_said_what_to_set(tmp_path: Path, present: tuple[str, ...]) -> None:
    for name in present:
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(NoControlPlane, match="KUBEBUILDER_ASSETS"), running_control_plane(tmp_path, tmp_path / "run"):
        pass


def test_binaries_without_scheduler_and_controller_manager_are_enough(tmp_path: Path) -> None:
    """setup-envtest ships just etcd, kube-apiserver and kubectl."""
    for name in ("etcd", "kube-apiserver"):
        (tmp_path / name).write_text("#!/bin/sh\necho Kubernetes v1.34.0\n")
        (tmp_path / name).chmod(0o755)
    found = prepare(lay_out(tmp_path, tmp_path / "run"), Settings())
    assert found.minor == 34
    assert found.missing == ("kube-scheduler", "kube-controller-manager")
    assert found.components == (found.etcd, found.apiserver)


def test_a_warning_header_is_read_as_kubectl_reads_it() -> None:
    assert warning_text(r'299 - "say \"M40\""') == 'say "M40"'
