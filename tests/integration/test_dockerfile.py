"""The container image, tested without a container engine.

The commands of the Dockerfile run in new directories of this machine. The content of the base image is not tested.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.processes import DOCKERFILE, SCRIPTS, OwnProcess

PROJECT = Path(__file__).parents[2]
PROGRAMS = ("vcuda-webhook", "vcuda-controller", "vcuda-certs", "kubectl-gpuquota")
USER = 65532
QUOTA = PROJECT / "manifests" / "examples" / "gpuquota.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


Stage = list[tuple[str, str]]
"""The instructions of a stage of the Dockerfile, each with its text."""


def stages() -> list[Stage]:
    found: list[Stage] = []
    for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines():
        name, _, text = line.partition(" ")
        if not line or name == "#":
            continue
        if name == "FROM":
            found.append([])
        found[-1].append((name, text))
    return found


def texts(stage: Stage, wanted: str) -> list[str]:
    return [text for name, text in stage if name == wanted]


class Image(NamedTuple):
    """The directories of this machine that replace the directories of the container image."""

    environment: Path
    base: Path

    def program(self, name: str) -> Path:
        return self.environment / "bin" / name


def run(command: str, cwd: Path, places: Mapping[str, Path], python: Path) -> None:
    """Run the command of a RUN instruction in a shell. ``places`` maps directories of the image to directories here."""
    for there, here in places.items():
        command = command.replace(there, str(here))
    path = f"{python.parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(("sh", "-c", command), cwd=cwd, env={**env, "PATH": path}, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr


def stand_in(directory: Path) -> Path:
    venv.create(directory, with_pip=True)
    shutil.copytree(Path(sysconfig.get_path("stdlib")) / "ensurepip", directory / "lib" / "python3.11" / "ensurepip")
    return directory


def copied(instructions: list[str], source: Path) -> None:
    for text in instructions:
        *names, target = text.split()
        for name in names:
            assert f"!{name}" in (PROJECT / ".dockerignore").read_text().splitlines(), name
            here = PROJECT / name
            if here.is_dir():
                shutil.copytree(here, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(here, source / target)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    build, final = stages()
    directory = Path(tempfile.mkdtemp(prefix="image-"))
    directory.chmod(0o755)
    try:
        source, environment = directory / "src", directory / "opt-vcuda"
        source.mkdir()
        copied(texts(build, "COPY"), source)
        builder = stand_in(directory / "builder") / "bin" / "python"
        for command in texts(build, "RUN"):
            run(command, source, {"/opt/vcuda": environment}, builder)
        shutil.rmtree(source)
        base = stand_in(directory / "base")
        for command in texts(final, "RUN"):
            run(command, directory, {"/usr/local": base}, base / "bin" / "python")
        yield Image(environment, base)
    finally:
        shutil.rmtree(directory)


def test_hadolint_finds_no_fault() -> None:
    done = subprocess.run((SCRIPTS / "hadolint", DOCKERFILE), capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_only_the_environment_is_copied_from_the_build_and_it_runs_as_a_numeric_non_root_user() -> None:
    """The image has no ENTRYPOINT, because the manifests name the program."""
    build, final = stages()
    assert texts(build, "FROM") == [f"{texts(final, 'FROM')[0]} AS build"]
    assert f"python:{sys.version_info.major}.{sys.version_info.minor}-" in texts(final, "FROM")[0]
    assert texts(final, "COPY") == ["--from=build /opt/vcuda /opt/vcuda"]
    assert texts(final, "USER") == [f"{USER}:{USER}"]
    assert texts(final, "ENTRYPOINT") == []
    assert json.loads(texts(final, "CMD")[0])[0] in PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs(image: Image, name: str) -> None:
    command = (image.program(name), "--help")
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=True, timeout=60)
    assert "Usage:" in done.stdout


def test_no_installer_or_build_tool_is_left(image: Image) -> None:
    for place in (image.environment, image.base):
        packages = {found.name.partition("-")[0] for found in place.glob("lib/python3*/site-packages/*.dist-info")}
        assert not packages & {"pip", "setuptools", "wheel", "pytest", "ruff", "mypy"}, place
        assert not list(place.glob("bin/*pip*")), place
    assert not list(image.base.glob("lib/python3.11/ensurepip"))
    done = subprocess.run((image.program("python"), "-m", "pip", "--version"), capture_output=True, check=False)
    assert done.returncode == 1


def test_every_data_file_of_the_sources_is_in_the_image(image: Image) -> None:
    """`package_data` in setup.cfg must name templates and styles of the usage page, and py.typed."""
    [packages] = image.environment.glob("lib/python3*/site-packages")
    there = (found for part in ("vcuda", "webhook", "controller", "certs") for found in (PROJECT / part).rglob("*"))
    wanted = [found.relative_to(PROJECT) for found in there if found.is_file() and "__pycache__" not in found.parts]
    assert len(wanted) > 50
    assert [str(each) for each in wanted if not (packages / each).is_file()] == []


def test_every_user_may_read_the_image(image: Image) -> None:
    """All files belong to root, and the containers run as another user."""
    for found in image.environment.rglob("*"):
        needed = stat.S_IXOTH if found.is_dir() else stat.S_IROTH
        assert found.is_symlink() or found.stat().st_mode & needed, found


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make the root read-only and to change the user")
def test_the_webhook_serves_on_a_read_only_root_as_that_user(image: Image) -> None:
    """The webhook writes only to /dev/shm. For this test the user gets the right to read this machine's Python."""
    directory = image.environment.parent / "read-only"
    subprocess.run((image.program("vcuda-certs"), "issue", "--dir", directory), check=True, capture_output=True)
    quota = Path(shutil.copy(QUOTA, directory))
    for found in (directory, *directory.iterdir()):
        os.chown(found, USER, USER)
    rights = "-all,+dac_read_search"
    passing = (f"--inh-caps={rights}", f"--ambient-caps={rights}", f"--bounding-set={rights}")
    user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs", *passing)
    read_only = ("unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "sh")
    serve = ("serve", "--standalone", "--quota", quota, "--cert-dir", directory, "--bind", "127.0.0.1:0")
    command = (*read_only, *user, image.program("vcuda-webhook"), *serve)
    with OwnProcess(command, {"PYTHONDONTWRITEBYTECODE": "1"}) as process:
        process.await_log("listening")
        status = Path(f"/proc/{process.process.pid}/status").read_text()
    assert f"Uid:\t{USER}\t{USER}" in status
