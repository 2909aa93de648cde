"""`make release` writes the same bytes in each run. It rejects a version other than the version of the package."""

import hashlib
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from click import ClickException
from click.testing import CliRunner

from tests.helm import program, templated
from tests.kubectl import kubectl
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
    date = 1_700_000_000
    source, both = tmp_path_factory.mktemp("source"), (tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other"))
    release.source_of("HEAD", source)
    for target in both:
        wheel = release.write_wheel(source, target, date)
        plugin = plugin_file.write(wheel, (source / release.LOCK).read_text(), target, date)
        plugin_file.write_krew(plugin, source / "LICENSE", __version__, REPOSITORY, date)
        release.write_chart(source, target, __version__, date)
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


def test_install_yaml_has_the_image(written: tuple[Path, Path]) -> None:
    text = (written[0] / "install.yaml").read_text()
    assert {line.split()[-1] for line in text.splitlines() if " image: " in line} == {IMAGE}
    assert all(found["kind"] for found in yaml.safe_load_all(text))


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


def test_a_failed_command_is_reported_with_its_output(tmp_path: Path) -> None:
    (tmp_path / release.BUILD_LOCK).touch()
    with pytest.raises(ClickException, match="failed:"):
        release.write_wheel(tmp_path, tmp_path, 0)
