"""Tests of `make release`: it writes the same bytes in each run, and rejects any version but the package's."""

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helm import program, templated
from tests.kubectl import kubectl
from tools import install_yaml, release
from vcuda import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATE = 1_700_000_000
IMAGE = "registry.example/vcuda-quota:1.2.3"
NAMED = f"--image={IMAGE}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The output directories of two runs of `make release`, without the SBOM, which needs one more package."""
    kubectl()  # if kubectl is missing, the test is skipped here
    if not (release.ROOT / ".git").exists():
        pytest.skip("no git repository: a release is made from a commit")
    source, both = tmp_path_factory.mktemp("source"), (tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other"))
    release.source_of("HEAD", source)
    for target in both:
        release.write_wheel(source, target, DATE)
        release.write_chart(source, target, __version__, DATE)
        install_yaml.write(IMAGE, (), target / "install.yaml", source / "manifests")
        (target / release.SUMS).write_text("".join(release.sums(target)))
    return both


def test_two_runs_on_one_commit_give_the_same_bytes(written: tuple[Path, Path]) -> None:
    one, other = ({path.name: path.read_bytes() for path in each.iterdir()} for each in written)
    assert one == other
    assert len(one) == 4
    for line in one[release.SUMS].decode().splitlines():
        checksum, name = line.split()
        assert hashlib.sha256(one[name]).hexdigest() == checksum


def test_the_wheel_has_every_package_and_no_test(written: tuple[Path, Path]) -> None:
    [wheel] = written[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert top == {"vcuda", "webhook", "controller", "certs", f"vcuda_quota-{__version__}.dist-info"}


@pytest.fixture(scope="module")
def plugin(written: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel, installed by pip without extras, and the packages that the wheel requires."""
    [wheel] = written[0].glob("*.whl")
    directory = tmp_path_factory.mktemp("plugin")
    constraint = directory / "constraint.txt"
    constraint.write_text(re.sub(r" \\\n.*", "", (release.ROOT / release.LOCK).read_text()))
    command = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*command, "--target", directory, "--constraint", constraint, wheel), check=True, timeout=120)
    return directory


def run(plugin: Path, program: str, *arguments: str) -> tuple[int, str, str]:
    """Run a program of the installed plugin by a Python that has no other packages."""
    command = (sys.executable, "-S", "-P", str(plugin / "bin" / program), *arguments)
    env = {"PYTHONPATH": str(plugin)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_plugin_runs_with_the_packages_that_the_wheel_requires(plugin: Path) -> None:
    assert run(plugin, "kubectl-gpuquota", "--version") == (0, f"kubectl gpuquota {__version__}\n", "")
    status, output, _ = run(plugin, "kubectl_complete-gpuquota", "rej")
    assert (status, output.partition("\t")[0]) == (0, "rejections")


@pytest.mark.parametrize("command", ["nodes", "doctor"])
def test_a_command_that_needs_more_packages_names_the_extra(plugin: Path, command: str) -> None:
    status, output, message = run(plugin, "kubectl-gpuquota", command)
    assert (status, output) == (1, "")
    assert message.startswith(f"Error: kubectl gpuquota {command} needs the package ")
    assert message.endswith(". Install vcuda-quota[server]\n")


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
    done = CliRunner().invoke(release.main, ["--version=9.9.9", NAMED, f"--output={tmp_path}"])
    assert done.exit_code == 2
    assert f"--version is 9.9.9, and vcuda/__init__.py has {__version__}: change one of them" in done.output
    assert not [*tmp_path.iterdir()]


def test_a_directory_with_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    done = CliRunner().invoke(release.main, [f"--version={__version__}", NAMED, f"--output={tmp_path}"])
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
