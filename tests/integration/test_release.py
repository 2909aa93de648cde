"""`make release` writes the same bytes in each run. It rejects a version other than the version of the package.

The single file of the plugin `kubectl gpuquota` has only Python code of locked packages.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from click.testing import CliRunner

from tests.helm import program, templated
from tests.kubectl import kubectl
from tests.plugin import DATE, write_python
from tools import install_yaml, plugin_file, release
from vcuda import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = "https://git.example/team/vcuda-quota"
IMAGE = "registry.example/vcuda-quota:1.2.3"
NAMED = (f"--image={IMAGE}", f"--repository={REPOSITORY}")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The output directories of two runs of `make release`, without the SBOM, which needs another package."""
    kubectl()  # if kubectl is missing, the test is skipped here
    if not (release.ROOT / ".git").exists():
        pytest.skip("no git repository: a release is made from a commit")
    source, both = tmp_path_factory.mktemp("source"), (tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other"))
    release.source_of("HEAD", source)
    for target in both:
        wheel = release.write_wheel(source, target, DATE)
        plugin = plugin_file.write(wheel, (source / release.LOCK).read_text(), target, DATE)
        plugin_file.write_krew(plugin, source / "LICENSE", __version__, REPOSITORY, DATE)
        release.write_chart(source, target, __version__, DATE)
        install_yaml.write(IMAGE, (), target / "install.yaml", source / "manifests")
        (target / release.SUMS).write_text("".join(release.sums(target)))
    return both


def test_two_runs_on_one_commit_give_the_same_bytes(written: tuple[Path, Path]) -> None:
    one, other = ({path.name: path.read_bytes() for path in each.iterdir()} for each in written)
    assert one == other
    assert len(one) == 7
    for line in one[release.SUMS].decode().splitlines():
        checksum, name = line.split()
        assert hashlib.sha256(one[name]).hexdigest() == checksum


def test_the_wheel_has_every_package_and_no_test(written: tuple[Path, Path]) -> None:
    [wheel] = written[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert top == {"vcuda", "webhook", "controller", "certs", f"vcuda_quota-{__version__}.dist-info"}


def test_the_wheel_is_built_by_the_locked_build_tool(written: tuple[Path, Path]) -> None:
    [wheel] = written[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        [version] = re.findall(r"^Generator: setuptools \(([\d.]+)\)$", archive.read(metadata).decode(), re.MULTILINE)
    assert f"\nsetuptools=={version} " in (release.ROOT / release.BUILD_LOCK).read_text()


def test_the_packed_chart_renders_the_same_as_the_chart(written: tuple[Path, Path], tmp_path: Path) -> None:
    [packed] = written[0].glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    assert templated(chart=packed).stdout == templated(chart=tmp_path / "vcuda-quota").stdout != ""


def test_another_version_than_that_of_the_package_is_rejected(tmp_path: Path) -> None:
    done = CliRunner().invoke(release.main, ["--version=9.9.9", *NAMED, f"--output={tmp_path}"])
    assert done.exit_code == 2
    assert f"--version is 9.9.9, and vcuda/__init__.py has {__version__}: change one of them" in done.output
    assert not [*tmp_path.iterdir()]


def test_a_directory_with_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    done = CliRunner().invoke(release.main, [f"--version={__version__}", *NAMED, f"--output={tmp_path}"])
    assert done.exit_code == 2
    assert "is not empty: remove it first" in done.output


def test_the_notes_are_the_section_of_the_version_or_the_unreleased_changes() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2026-12-01)\n\n- this\n\n## 0.1.0\n\n- old\n"
    assert [release.notes_of(changelog, version) for version in ("0.2.0", "0.1.0", "1.0.0")] == [
        "- this\n",
        "- old\n",
        "- new\n",
    ]


def test_the_workflows_have_no_fault() -> None:
    workflows = sorted((release.ROOT / ".github" / "workflows").glob("*.yml"))
    assert workflows
    done = subprocess.run((program("actionlint"), *workflows), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# Tests of the single file of the plugin `kubectl gpuquota`


OLD_PYTHON = SimpleNamespace(version_info=(3, 9, 6), exit=sys.exit)


@pytest.fixture
def plugin(written: tuple[Path, Path]) -> Path:
    return written[0] / "kubectl-gpuquota"


def run(plugin: Path, tmp_path: Path, *arguments: str, name: str = "kubectl-gpuquota") -> tuple[int, str, str]:
    write_python(tmp_path)
    named = tmp_path / name
    named.symlink_to(plugin)
    env = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": str(tmp_path)}
    done = subprocess.run((named, *arguments), env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_file_has_the_wheel_and_the_base_packages_and_nothing_compiled(plugin: Path) -> None:
    with zipfile.ZipFile(plugin) as archive:
        names = archive.namelist()
        contents = [archive.read(name)[:4] for name in names]
    assert [name for name in names if name.endswith((".so", ".pyd", ".dylib", ".pyc"))] == []
    assert [content for content in contents if content in (b"\x7fELF", b"MZ\x90\x00", b"\xcf\xfa\xed\xfe")] == []
    infos = {name.split("-")[0] for name in names if ".dist-info/" in name}
    assert infos == {"click", "pyyaml", "vcuda_quota"}
    assert plugin.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert os.access(plugin, os.X_OK)


def test_the_file_runs_without_any_other_package(plugin: Path, tmp_path: Path) -> None:
    assert run(plugin, tmp_path, "--version") == (0, f"kubectl gpuquota {__version__}\n", "")


def test_the_one_command_that_needs_more_packages_names_the_extra(plugin: Path, tmp_path: Path) -> None:
    told = "Error: kubectl gpuquota nodes needs the package msgspec. Install vcuda-quota[server]\n"
    assert run(plugin, tmp_path, "nodes") == (1, "", told)


def test_under_the_name_that_kubectl_looks_for_it_completes_words(plugin: Path, tmp_path: Path) -> None:
    status, output, _ = run(plugin, tmp_path, "ref", name="kubectl_complete-gpuquota")
    word, help_text = output.splitlines()[0].split("\t")
    assert (status, word, output.splitlines()[1:]) == (0, "refusals", [":4"])
    assert help_text.startswith("Show the workloads")


def test_an_older_python_gets_one_sentence(plugin: Path) -> None:
    """An older Python compiles only __main__.py of the plugin's file, so this module must not use newer syntax."""
    with zipfile.ZipFile(plugin) as archive:
        text = archive.read("__main__.py").decode()
    checked, _, _ = text.partition("if sys.argv")
    with pytest.raises(SystemExit, match=r"kubectl gpuquota needs Python 3\.11 or newer; this is 3\.9"):
        exec(checked.replace("import sys", ""), {"sys": OLD_PYTHON})  # noqa: S102  # the test runs our own file
    compile(text, "__main__.py", "exec", dont_inherit=True)


def test_krew_finds_what_its_manifest_promises(written: tuple[Path, Path]) -> None:
    [platform] = yaml.safe_load((written[0] / "gpuquota.yaml").read_text())["spec"]["platforms"]
    file = written[0] / platform["uri"].rpartition("/")[2]
    assert platform["uri"] == f"{REPOSITORY}/releases/download/v{__version__}/{file.name}"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == platform["sha256"]
    with tarfile.open(file) as archive:
        modes = {member.name: member.mode for member in archive.getmembers()}
    assert modes == {"kubectl-gpuquota": 0o755, "LICENSE": 0o644}
    assert [each["from"] for each in platform["files"]] == [*modes]
    assert platform["bin"] in modes
