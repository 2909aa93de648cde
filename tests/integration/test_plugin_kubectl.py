"""Tests of `kubectl gpuquota` with a real kubectl: kubeconfigs, contexts, namespaces, and unreachable clusters."""

import os
from pathlib import Path

import pytest
import yaml

from controller.plugin import kubectl as transport
from controller.plugin.kubectl import Kubectl
from tests.gpuquota import run
from tests.kubectl import kubectl
from vcuda.errors import TooLarge, Unavailable

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{Path(kubectl()).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def kubeconfig(path: Path, current: str | None, **namespaces: str | None) -> Path:
    about = {"apiVersion": "v1", "kind": "Config", **({"current-context": current} if current else {})}
    given = {name: {"cluster": "c", "user": "u", "namespace": namespace} for name, namespace in namespaces.items()}
    contexts = [{"name": name, "context": context} for name, context in given.items()]
    server = {"server": "https://127.0.0.1:1"}
    reached = {"clusters": [{"name": "c", "cluster": server}], "users": [{"name": "u", "user": {"token": "t"}}]}
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({**about, **reached, "contexts": contexts}))
    return path


@pytest.mark.parametrize(
    ("current", "context", "namespace"),
    [
        ("mine", None, "team-a"),
        ("mine", "other", "team-b"),
        (None, "other", "team-b"),
        *(("bare", None, "default"), ("null", None, "default"), (None, None, "default")),
    ],
)
def test_the_namespace_is_kubectl_s(home: Path, current: str | None, context: str | None, namespace: str) -> None:
    path = kubeconfig(home / "config", current, mine="team-a", other="team-b", bare="", null=None)
    assert Kubectl.find(path, context).namespace() == namespace


def test_every_file_that_kubeconfig_lists_counts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [kubeconfig(home / "one", "mine"), kubeconfig(home / "two", None, mine="team-b")]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
    assert Kubectl.find().namespace() == "team-b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "nobody"], 'context "nobody" does not exist'),
        (["--kubeconfig", "/nowhere/config"], "stat /nowhere/config: no such file or directory"),
    ],
)
def test_a_context_or_kubeconfig_that_is_not_there_is_bad_input(home: Path, arguments: list[str], message: str) -> None:
    kubeconfig(home / ".kube" / "config", "mine", mine="team-a")
    done = run("-n", "team-a", *arguments)
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"Error: {message}\n")


def test_a_cluster_that_is_not_there_is_an_error_with_kubectls_text(home: Path) -> None:
    kubeconfig(home / ".kube" / "config", "mine", mine="team-a")
    done = run()
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: The connection to the server 127.0.0.1:1 was refused")
    with pytest.raises(Unavailable):
        Kubectl.find().post_heard("/api/v1/namespaces/team-a/pods", b"{}")


def test_an_answer_without_end_is_not_read_to_the_end(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = home / "kubectl"
    endless.write_text("#!/bin/sh\nexec cat /dev/zero\n")
    endless.chmod(0o755)
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 2**20)
    with pytest.raises(TooLarge, match="has more than 1048576 bytes"):
        Kubectl((str(endless),)).get("/api")


def test_a_page_that_is_too_large_is_requested_again_with_fewer_objects(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script replaces kubectl. With limit=200 it returns a page that is too large, otherwise a small page."""
    program = home / "kubectl"
    program.write_text(
        """#!/bin/sh
case "$*" in *limit=200*) size=2000 ;; *continue=more*) token= ; size=10 ;; *) token=more ; size=10 ;; esac
printf '{"metadata": {"continue": "%s"}, "items": [{"pad": "%0*d"}]}' "$token" "$size" 0
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(transport, "MAX_ANSWER_BYTES", 500)
    objects = Kubectl((str(program),)).list_objects("/api/v1/events", {"fieldSelector": "reason=x"})
    assert [*objects] == [{"pad": 10 * "0"}] * 2
