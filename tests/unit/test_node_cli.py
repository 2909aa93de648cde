"""Tests of input that ``vcuda-controller node`` rejects before it changes anything."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.garbage.node.names import VM_DIRECTORIES
from tests.tables import cases

STAY = ["--scheme", "gpu-manager", "--node", "gpu-7"]


@pytest.fixture
def no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an invalid kubeconfig. The command reads the kubeconfig only after it has checked all other input."""
    monkeypatch.setattr("controller.garbage.node.in_use.sees_host", lambda: False)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("")
    return kubeconfig


@cases(
    "flags, says",
    no_scheme=([], "--scheme"),
    no_node=(STAY[:2], "--node"),
    no_pod_uid_and_no_kubelet_directory=(STAY, "--pod-uid or --kubelet-pods is required"),
    a_file_of_pods_without_once=([*STAY, "--pod-uid", "u", "--pods", "-"], "--pods requires --once"),
    host_PID_without_hostPID_true=([*STAY, "--pod-uid", "u", "--host-pid"], "--host-pid requires hostPID: true"),
    no_address=([*STAY, "--pod-uid", "u", "--status-address", "here:http"], "must be HOST:PORT"),
    over_100=([*STAY, "--pod-uid", "u", "--disk-pressure", "101"], "--disk-pressure"),
    no_period=([*STAY, "--pod-uid", "u", "--period", "0"], "--period"),
    no_cluster=([*STAY, "--pod-uid", "u"], "No usable kubeconfig"),
    no_cluster_with_kubelets_pods=([*STAY, "--kubelet-pods", "/"], "No usable kubeconfig"),
)
def test_bad_input_is_exit_status_2(no_cluster: Path, flags: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["node", "--kubeconfig", str(no_cluster), *flags])
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_help_names_every_scheme_the_rights_and_the_exit_statuses() -> None:
    text = " ".join(CliRunner().invoke(main, ["node", "--help"]).output.split())
    for scheme in VM_DIRECTORIES:
        assert scheme in text
    for part in ("Examples:", "Exit status:", "SYS_PTRACE", "VCUDA_NODE"):
        assert part in text


def test_a_flag_may_be_an_environment_variable(no_cluster: Path) -> None:
    env = {"VCUDA_SCHEME": "hami", "VCUDA_NODE": "gpu-7", "VCUDA_POD_UID": "u", "VCUDA_KUBECONFIG": str(no_cluster)}
    assert "No usable kubeconfig" in CliRunner().invoke(main, ["node"], env=env).output
