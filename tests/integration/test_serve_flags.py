"""Tests of the flags of ``vcuda-webhook serve``: invalid values, and the environment variable of each flag."""

import os
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from examples.claims import claim
from tests.integration.reviews import card_pod, gpu_pod, patched
from tests.processes import PATIENCE, SCRIPTS, serving
from webhook.cli import main, serve

pytestmark = pytest.mark.slow

FILES = {
    "good.yaml": "team-a: {quota: {M40: 8}}",
    "faults.yaml": "team-a: {quota: {M40: -1}, pol: [x]}\nteam-b: {quota: 8}",
    "nodes.yaml": "{kind: Pod, metadata: {name: p}}",
    "certs/tls.crt": "no certificate",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


def run(directory: Path, flags: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("VCUDA_", "KUBE"))}
    command = [str(SCRIPTS / "vcuda-webhook"), "serve", *flags.split()]
    return subprocess.run(
        command, cwd=directory, env=ours, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


SOUND = "--standalone --quota good.yaml"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--standalone", "--standalone needs --quota FILE."),
        ("", "--cert-dir DIR is needed; `vcuda-certs issue --dir DIR` makes one."),
        ("--standalone --quota nowhere", "File 'nowhere' does not exist"),
        (f"{SOUND} --cert-dir empty", "empty/tls.crt cannot be read: No such file or directory. To create "),
        (f"{SOUND} --cert-dir certs", "certs/tls.crt contains no PEM certificate"),
        (f"{SOUND} --nodes nodes.yaml", "document 1: the Pod p has no namespace"),
        (f"{SOUND} --bind 8443", "must be HOST:PORT, for example 127.0.0.1:8080 or [fd00::7]:8080; got '8443'."),
        (f"{SOUND} --bind a:99999", "must be HOST:PORT"),
        (f"{SOUND} --log-level loud", "'loud' is not one of"),
        ("--cert-dir certs --quota-configmap gpuquota", "is not NAMESPACE/NAME"),
        ("--cert-dir certs --kubeconfig nowhere", "No usable kubeconfig at nowhere"),
        ("--standalone --quota good.yaml --gpu-runtime-classes=nvidia,N_V", "nvidia,kata-*-gpu; got 'N_V'"),
        ("--standalone --quota good.yaml --gpu-runtime-classes=nvidia-*,-x?", "nvidia,kata-*-gpu; got '-x?'"),
    ],
)
def test_bad_input_ends_with_status_2_and_a_message(files: Path, flags: str, sentence: str) -> None:
    done = run(files, flags)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_malformed_quota_is_rejected_with_every_fault(files: Path) -> None:
    done = run(files, "--standalone --quota faults.yaml")
    assert done.returncode == 2
    first, *faults = done.stderr.splitlines()
    assert first == "Error: the quota document is malformed:"
    assert [fault.split(":")[0].strip() for fault in faults] == ["team-a.quota.M40", "team-a.pol", "team-b.quota"]


def options() -> list[click.Option]:
    return [option for option in serve.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("option", options(), ids=lambda option: option.opts[0])
def test_every_flag_is_an_environment_variable_and_the_help_says_which(option: click.Option) -> None:
    help_text = CliRunner().invoke(main, ["serve", "--help"]).stdout.split()
    flag = option.opts[0]
    variable = f"VCUDA_{flag.removeprefix('--').replace('-', '_').upper()}"
    assert flag in help_text
    assert any(word.strip("[];,") == variable for word in help_text)


def test_the_environment_alone_is_enough(files: Path) -> None:
    env = {
        "VCUDA_STANDALONE": "true",
        "VCUDA_QUOTA": str(files / "good.yaml"),
        "VCUDA_LOG_LEVEL": "debug",
        "VCUDA_MODEL_LABEL": "example.com/model",
        "VCUDA_SCHEDULER_NAME": "gpu-scheduler",
    }
    with serving(env=env) as server:
        pod = card_pod("pod", "team-a")
        spec = patched(pod, server.review("/mutate", pod))["spec"]
        assert spec["schedulerName"] == "gpu-scheduler"
        assert "example.com/model" in str(spec["affinity"])
        server.review("/mutate", gpu_pod("web", "team-a", {}), uid="u-web")
        server.terminate()
        assert "u-web" in [line.get("uid") for line in server.logs() if line["level"] == "debug"]


def test_only_claims_of_the_schedulers_that_a_flag_names_are_admitted(files: Path) -> None:
    named = {"system:kube-scheduler", "system:serviceaccount:kai:scheduler"}
    flag = f"--scheduler-users={', '.join(named)}"
    with serving("--standalone", "--quota", files / "good.yaml", flag) as server:
        for user in (*named, "alice", "system:serviceaccount:kai:binder"):
            asked = claim(namespace="team-a", uid=user)
            about = {"kind": {"group": "resource.k8s.io", "version": "v1", "kind": asked["kind"]}}
            answer = server.review("/validate", asked, userInfo={"username": user}, **about)
            assert answer["allowed"] is (user in named)
