"""Tests that `make chart` and `make install-yaml` render the manifests by kustomize or kubectl, without a cluster."""

import subprocess
from pathlib import Path

import pytest

from tools.chart.features import render

PROJECT = Path(__file__).parents[2]
PRINTED = "apiVersion: v1\nkind: Namespace\nmetadata: {name: printed}\n"


def install(directory: Path, program: str, argument: str) -> None:
    """Write a program that prints `PRINTED` if its arguments are this one and a directory."""
    path = directory / program
    path.write_text(f'#!/bin/sh\n[ "$1/$#" = {argument}/2 ] && printf "{PRINTED}"\n')
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH."""
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("program", "argument"), [("kustomize", "build"), ("kubectl", "kustomize")])
def test_the_manifests_are_rendered_by_kustomize_or_by_the_kustomize_of_kubectl(
    programs: Path, program: str, argument: str
) -> None:
    install(programs, program, argument)
    assert [found.name for found in render()] == ["printed"]


def test_kustomize_is_used_if_both_are_installed(programs: Path) -> None:
    install(programs, "kustomize", "build")
    install(programs, "kubectl", "version")
    assert len(render()) == 1


@pytest.mark.usefixtures("programs")
def test_without_kustomize_the_error_says_what_builds_it() -> None:
    with pytest.raises(FileNotFoundError, match="of `tests/e2e/build-tools kustomize`"):
        render()


@pytest.mark.parametrize("target", ["chart", "install-yaml"])
def test_the_manifests_are_written_without_building_a_kubernetes(target: str) -> None:
    command = ("make", "--dry-run", "--assume-old=.venv/installed", target)
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=30)
    assert "tests/e2e/build-tools kustomize" in done.stdout
    assert "build-control-plane" not in done.stdout
