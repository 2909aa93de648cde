"""Tests that `make image` builds the image with the first of docker, podman and buildah that is installed.

If none is installed, it prints one line that says what to install.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vcuda import __version__

PROJECT = Path(__file__).parents[2]
IMAGE = "registry.example/vcuda-quota:1.2.3"


def make(directory: Path, *arguments: str, engines: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `make image` with a PATH that only has make, a shell and these engines.

    Each engine is a script that logs its arguments. The variable MAKELEVEL is removed, because with it make's messages
    begin with `make[1]`.
    """
    for program in ("make", "sh"):
        (directory / program).symlink_to(shutil.which(program) or program)
    for engine in engines:
        (directory / engine).write_text(f'#!/bin/sh\necho {engine} "$@" >>"{directory}/log"\n')
        (directory / engine).chmod(0o755)
    command = (str(directory / "make"), "--silent", "image", *arguments)
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    env = {**inherited, "PATH": str(directory), "SHELL": str(directory / "sh")}
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False, timeout=30)


ENGINES = ("docker", "podman", "buildah")


@pytest.mark.parametrize(("engines", "used"), [(ENGINES[first:], used) for first, used in enumerate(ENGINES)])
def test_the_image_is_built_by_the_engine_that_is_there(tmp_path: Path, engines: tuple[str, ...], used: str) -> None:
    done = make(tmp_path, f"IMAGE={IMAGE}", engines=engines)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == f"{used} build --tag {IMAGE} .\n"


def test_a_base_that_is_named_replaces_the_base_of_the_dockerfile(tmp_path: Path) -> None:
    make(tmp_path, f"IMAGE={IMAGE}", "BASE=mirror.example/python:3.11", engines=("docker",))
    arguments = f"build --build-arg BASE=mirror.example/python:3.11 --tag {IMAGE} ."
    assert (tmp_path / "log").read_text() == f"docker {arguments}\n"


def test_the_commands_of_the_page_build_and_push_the_image_that_the_chart_then_names(tmp_path: Path) -> None:
    page = (PROJECT / "docs" / "install.md").read_text()
    commands = re.findall(r"^make image (.*)$", page, re.MULTILINE)
    assert commands
    assert "docker build" not in page
    for number, command in enumerate(commands):
        directory = tmp_path / str(number)
        directory.mkdir()
        make(directory, *command.split(), engines=("docker",))
        built, pushed = (directory / "log").read_text().splitlines()
        repository, _, tag = pushed.removeprefix("docker push ").rpartition(":")
        assert built == f"docker build --tag {repository}:{tag} ."
        assert (f"--set image.repository={repository}\n" in page, tag) == (True, __version__)


def test_without_an_engine_one_line_says_what_to_install(tmp_path: Path) -> None:
    done = make(tmp_path)
    told, _, of_make = done.stderr.partition("\n")
    wanted = "make image needs docker, podman or buildah. Install one of them, for example: apt-get install buildah"
    assert (done.returncode, told) == (2, wanted)
    assert of_make.startswith("make: *** ")
