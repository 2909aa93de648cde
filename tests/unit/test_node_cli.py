"""Tests of input that ``vcuda-controller node`` rejects before it does anything."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from controller.cli import main
from controller.garbage.node.names import VM_DIRECTORIES
from tests.tables import cases

STAY = ["--scheme", "gpu-manager", "--node", "gpu-7"]
UID = ["--pod-uid", "u"]


@pytest.fixture
def no_cluster(tmp_path: Path) -> Path:
    """Return an invalid kubeconfig. The command reads it last, so errors in other input are reported."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text("")
    return kubeconfig


@cases(
    "flags, says",
    no_scheme=([], "--scheme"),
    no_node=(STAY[:2], "--node"),
    no_pod_uid=(STAY, "--pod-uid"),
    no_address=([*STAY, *UID, "--status-address", "here:http"], "must be HOST:PORT"),
    a_negative_time=([*STAY, *UID, "--grace", "-1"], "--grace"),
    no_period=([*STAY, *UID, "--period", "0"], "--period"),
    no_cluster=([*STAY, *UID], "No usable kubeconfig"),
)
def test_bad_input_is_exit_status_2(no_cluster: Path, flags: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["node", "--kubeconfig", str(no_cluster), *flags])
    assert (result.exit_code, says in result.output) == (2, True), result.output


def test_help_names_every_scheme_the_rights_and_the_exit_statuses() -> None:
    text = " ".join(CliRunner().invoke(main, ["node", "--help"]).output.split())
    for scheme in VM_DIRECTORIES:
        assert scheme in text
    for part in ("Example, the command of the DaemonSet:", "Exit status:", "HostToContainer", "VCUDA_NODE"):
        assert part in text


def test_a_flag_may_be_an_environment_variable(no_cluster: Path) -> None:
    env = {"VCUDA_SCHEME": "hami", "VCUDA_NODE": "gpu-7", "VCUDA_POD_UID": "u", "VCUDA_KUBECONFIG": str(no_cluster)}
    assert "No usable kubeconfig" in CliRunner().invoke(main, ["node"], env=env).output
