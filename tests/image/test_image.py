"""The container image that was built from the Dockerfile: its files, its user, and its programs on a read-only root."""

import json
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest

from tests.image.container import Image
from tests.processes import OwnProcess
from tools.image.__main__ import ARCHIVE, IMAGE, MEGABYTE

PROJECT = Path(__file__).parents[2]
PROGRAMS = ("vcuda-webhook", "vcuda-controller", "vcuda-certs", "kubectl-gpuquota", "kubectl_complete-gpuquota")
OURS = ("vcuda", "webhook", "controller", "certs")
USER = 65532
MAX_MEGABYTES = 150
COMPILERS = {"as", "c++", "cc", "clang", "cpp", "g++", "gcc", "go", "ld", "make", "rustc", "tcc"}
INSTALLERS = {"ensurepip", "pip", "setuptools", "wheel"}

IMPORT_ALL = f"""
import importlib, pkgutil
for package in map(importlib.import_module, {OURS}):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def packages_of(image: Image) -> Path:
    [packages] = image.root.glob("opt/vcuda/lib/python3*/site-packages")
    return packages


@pytest.mark.usefixtures("image")
def test_the_archive_has_the_name_that_the_manifests_use() -> None:
    with tarfile.open(ARCHIVE) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        [described] = json.load(manifest)
    assert f"docker.io/library/{IMAGE}" in described["RepoTags"]


def test_a_container_runs_as_a_numeric_user_that_is_not_root(image: Image) -> None:
    """The manifests name the program to run, so the image has no entrypoint."""
    assert image.config["User"] == f"{USER}:{USER}"
    assert "Entrypoint" not in image.config
    assert image.config["Cmd"][0] in PROGRAMS


def test_the_image_has_no_compiler(image: Image) -> None:
    names = {found: found.name.rpartition("-linux-gnu-")[2] for found in image.paths() if "bin" in found.parts}
    assert len(names) > len(COMPILERS)
    assert [found for found, name in names.items() if name.partition("-")[0] in COMPILERS] == []


def test_the_image_has_no_pip_and_no_build_tool(image: Image) -> None:
    named = [found for found in image.paths() if found.name.partition("-")[0].rstrip("0123456789.") in INSTALLERS]
    assert named == []


def test_no_program_of_the_image_runs_with_the_rights_of_its_owner(image: Image) -> None:
    modes = {found: (image.root / found).lstat().st_mode for found in image.paths()}
    special = stat.S_ISUID | stat.S_ISGID
    assert [found for found, mode in modes.items() if stat.S_ISREG(mode) and mode & special] == []


def test_the_image_has_no_file_that_describes_the_machine_where_it_was_built(image: Image) -> None:
    """pip's settings on the build machine are mounted at /root during the build."""
    assert [found.name for found in (image.root / "root").iterdir() if found.name not in (".bashrc", ".profile")] == []
    assert list(image.root.glob("etc/**/pip.conf")) == []


def test_every_user_may_read_the_programs(image: Image) -> None:
    for found in (image.root / "opt").rglob("*"):
        needed = stat.S_IXOTH if found.is_dir() else stat.S_IROTH
        assert found.is_symlink() or found.stat().st_mode & needed, found


def test_every_data_file_of_the_sources_is_in_the_image(image: Image) -> None:
    """`package_data` in setup.cfg must name templates and styles of the usage page, and py.typed."""
    there = (found for part in OURS for found in (PROJECT / part).rglob("*"))
    wanted = [found.relative_to(PROJECT) for found in there if found.is_file() and "__pycache__" not in found.parts]
    assert len(wanted) > 50
    assert [str(each) for each in wanted if not (packages_of(image) / each).is_file()] == []


def test_the_image_adds_at_most_150_mb_to_its_base(image: Image) -> None:
    size = sum(found.lstat().st_size for found in (image.root / "opt").rglob("*") if found.is_file())
    assert size <= MAX_MEGABYTES * MEGABYTE


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs_on_a_read_only_root(image: Image, program: str, tmp_path: Path) -> None:
    done = image.run(tmp_path, program, "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_finds_the_packages_that_it_imports(image: Image, tmp_path: Path) -> None:
    done = image.run(tmp_path, "python", "-c", IMPORT_ALL)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_container_may_not_write_to_its_root(image: Image, tmp_path: Path) -> None:
    done = image.run(tmp_path, "python", "-c", "open('/tmp/new', 'w')")
    assert "Read-only file system: '/tmp/new'" in done.stderr


def test_the_webhook_serves_with_a_certificate_that_vcuda_certs_wrote(image: Image, tmp_path: Path) -> None:
    """Both programs run as the image's user on a read-only root. Only the directory of the certificate is writable."""
    certificates, issuing, serving = tmp_path / "certificates", tmp_path / "issuing", tmp_path / "serving"
    for directory in (certificates, issuing, serving):
        directory.mkdir()
    shutil.copy(PROJECT / "manifests" / "examples" / "gpuquota.yaml", certificates / "gpuquota.yaml")
    os.chown(certificates, USER, USER)
    mounts = {"/run/certificates": certificates}
    done = image.run(issuing, "vcuda-certs", "issue", "--dir", "/run/certificates", mounts=mounts)
    assert done.returncode == 0, done.stderr
    files = ("--quota", "/run/certificates/gpuquota.yaml", "--cert-dir", "/run/certificates")
    serve = ("vcuda-webhook", "serve", "--standalone", "--bind", "127.0.0.1:0", *files)
    with OwnProcess(image.command(serving, *serve, mounts=mounts), {}) as process:
        process.await_log("listening")
