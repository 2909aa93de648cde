"""One test fails where no kubectl can render the manifests, and says what to install; all others are then skipped."""

import os
from pathlib import Path

import pytest

from tests.kubectl import WHAT_TO_DO, NoKubectl, find_kubectl

SAYS = "clientVersion:\n  gitVersion: {}\n  gitTreeState: clean\n"


def kubectl_in(directory: Path, version: str) -> str:
    """The directory, with a kubectl in it that says it is of this release."""
    program = directory / "kubectl"
    directory.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{SAYS.format(version)}END\n")
    program.chmod(0o755)
    return str(directory)


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    """Without one their tests prove nothing: install it, or set KUBEBUILDER_ASSETS."""
    assert find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))


@pytest.mark.parametrize("version", ["v1.30.0", "v1.30.14", "v1.37.2", "v1.32.4-dispatcher"])
def test_a_kubectl_of_a_supported_version_is_taken(tmp_path: Path, version: str) -> None:
    assert find_kubectl(None, kubectl_in(tmp_path / "path", version)) == str(tmp_path / "path" / "kubectl")


@pytest.mark.parametrize("version", ["v1.29.14", "v1.9.0", ""])
def test_a_kubectl_that_is_too_old_is_named_with_its_version_and_what_to_do(tmp_path: Path, version: str) -> None:
    path = kubectl_in(tmp_path / "path", version)
    with pytest.raises(NoKubectl) as caught:
        find_kubectl(None, path)
    assert str(caught.value) == f"{path}/kubectl ({version or 'no version'}) cannot render the manifests. {WHAT_TO_DO}"


@pytest.mark.parametrize("assets", [None, "", "/nonexistent"])
def test_no_kubectl_at_all_is_told_with_what_to_do(tmp_path: Path, assets: str | None) -> None:
    with pytest.raises(NoKubectl) as caught:
        find_kubectl(assets, str(tmp_path))
    assert str(caught.value) == f"no kubectl to render the manifests with. {WHAT_TO_DO}"


def test_the_one_that_was_built_comes_before_the_one_on_path(tmp_path: Path) -> None:
    built, path = kubectl_in(tmp_path / "built", "v1.37.2"), kubectl_in(tmp_path / "path", "v1.29.14")
    assert find_kubectl(built, path) == f"{built}/kubectl"
    assert find_kubectl(str(tmp_path), kubectl_in(tmp_path / "newer", "v1.30.14")) == f"{tmp_path}/newer/kubectl"
