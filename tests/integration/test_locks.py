"""Tests that the lock files have a permitted version with hashes of each required package, and no other package."""

import configparser
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[2]
LOCK, BUILD_LOCK = PROJECT / "requirements.lock", PROJECT / "requirements-build.lock"
OURS = "vcuda-quota"

pytestmark = pytest.mark.slow


def entries(lock: Path) -> Mapping[str, str]:
    found = re.findall(r"^(\S+)==(.*?)(?=^\S|\Z)", lock.read_text(), re.MULTILINE | re.DOTALL)
    return {canonicalize_name(name): rest for name, rest in found}


def version_in(entry: str) -> str:
    return entry.split(maxsplit=1)[0]


def requirements(*options: tuple[str, str]) -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(PROJECT / "setup.cfg")
    lines = (line for section, option in options for line in setup[section][option].splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


IMAGE = requirements(("options", "install_requires"), ("options.extras_require", "server"))
BASE = requirements(("options", "install_requires"))


def test_the_lock_has_an_allowed_version_of_everything_that_setup_cfg_requires() -> None:
    """If this test fails, run `make lock`, which writes the lock files."""
    locked = entries(LOCK)
    assert [str(each) for each in IMAGE if canonicalize_name(each.name) not in locked] == []
    rejected = [str(each) for each in IMAGE if version_in(locked[canonicalize_name(each.name)]) not in each.specifier]
    assert rejected == []


def test_the_lock_has_nothing_that_setup_cfg_does_not_require_any_more() -> None:
    named = {name for name, entry in entries(LOCK).items() if re.search(rf"# .*{OURS} \(setup", entry)}
    assert named == {canonicalize_name(each.name) for each in IMAGE}
    needed: set[str] = {canonicalize_name(each.name) for each in IMAGE}
    while new := {name for each in needed for name in required_by(each)} - needed:
        needed |= new
    assert needed == {*entries(LOCK)}


def required_by(name: str) -> set[str]:
    """Return the packages that an installed package requires on this machine's platform."""
    found = (Requirement(each) for each in importlib.metadata.requires(name) or ())
    return {canonicalize_name(each.name) for each in found if not each.marker or each.marker.evaluate({"extra": ""})}


def test_the_tests_run_on_the_versions_of_the_image() -> None:
    installed = {name: importlib.metadata.version(name) for name in entries(LOCK)}
    assert installed == {name: version_in(entry) for name, entry in entries(LOCK).items()}


@pytest.mark.parametrize("lock", [LOCK, BUILD_LOCK], ids=lambda lock: lock.name)
def test_every_entry_has_hashes_and_no_place_of_an_index_is_written(lock: Path) -> None:
    found = entries(lock)
    assert found
    assert [name for name, entry in found.items() if "--hash=sha256:" not in entry] == []
    assert not re.search(r"://|^\s*--(?!hash=)|index|trusted-host", lock.read_text(), re.MULTILINE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_machine_of_the_image_finds_its_wheels_by_their_hashes(machine: str, tmp_path: Path) -> None:
    platforms = [f"--platform=manylinux{tag}_{machine}" for tag in ("2014", "_2_17", "_2_28", "_2_34")]
    options = ("--dry-run", "--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--target={tmp_path}")
    pip(*("install", "--require-hashes", *options, *platforms, "--requirement", str(LOCK)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("platform", ["win_amd64", "macosx_11_0_arm64", "macosx_11_0_x86_64"])
def test_the_base_package_can_be_installed_where_the_servers_cannot(platform: str, tmp_path: Path) -> None:
    options = ("--only-binary=:all:", "--platform", platform, "--python-version=3.11", f"--dest={tmp_path}")
    pip("download", *options, *map(str, BASE))
    names = {canonicalize_name(path.name.split("-")[0]) for path in tmp_path.glob("*.whl")}
    assert names >= {canonicalize_name(each.name) for each in BASE}


def pip(*arguments: str) -> None:
    command = (sys.executable, "-m", "pip", *arguments, "--quiet")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
