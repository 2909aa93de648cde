"""Tests of how `make image-tar` finds pip's index and Debian's mirror, and of its messages if it cannot build."""

import configparser
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.image import __main__ as image_tar, buildah, debian


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH. It also has the log of the programs in it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(buildah, "CACHE", tmp_path)
    monkeypatch.setattr(buildah, "LOG", tmp_path / "build.log")
    return tmp_path


def install(directory: Path, program: str, script: str) -> None:
    path = directory / program
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_pip_in_the_build_has_the_index_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable replaces the setting of a file. The build gets no directories of this machine."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://file.example\ntrusted-host = a.example\n    b.example\n")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable.example")
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/wheels")
    parser = configparser.ConfigParser()
    with image_tar.home_of_pip() as home:
        parser.read(home / ".pip" / "pip.conf")
    found = {name: text for name, text in parser["global"].items() if name != "cert"}
    assert found == {"index-url": "https://variable.example", "trusted-host": "a.example b.example"}


def test_the_certificate_of_pip_is_in_the_home_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = tmp_path / "own.crt"
    certificate.write_text("a certificate")
    monkeypatch.setenv("PIP_CERT", str(certificate))
    with image_tar.home_of_pip() as home:
        assert "cert = /root/ca.crt\n" in (home / ".pip" / "pip.conf").read_text()
        assert (home / "ca.crt").read_text() == "a certificate"


@pytest.mark.parametrize(
    ("printed", "mirror"),
    [
        ("Debian-Security main https://security.example/debian", None),
        ("Other main https://other.example", None),
        ("Debian contrib https://contrib.example", None),
        ("Debian main https://mirror.example/debian/", "https://mirror.example/debian/"),
    ],
)
def test_the_base_is_made_from_the_mirror_that_apt_uses(programs: Path, printed: str, mirror: str | None) -> None:
    install(programs, "apt-get", f"echo '{printed}'")
    if mirror:
        assert debian.mirror() == mirror
    else:
        with pytest.raises(buildah.CannotBuild, match="Run apt-get update, or name a base image with BASE=IMAGE"):
            debian.mirror()


def test_a_missing_program_is_named_with_its_package() -> None:
    with pytest.raises(buildah.CannotBuild, match=r"buildah was not found\. Install Debian's package buildah"):
        buildah.buildah("images")


def test_the_output_of_a_failed_program_is_in_the_log(programs: Path) -> None:
    install(programs, "buildah", "echo STEP; echo reason >&2; exit 3")
    with pytest.raises(buildah.CannotBuild, match=f"buildah failed with status 3. The output is in {programs}"):
        buildah.buildah("build")
    assert (programs / "build.log").read_text() == "reason\nSTEP\n"


def test_another_user_than_root_is_sent_to_make_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    done = CliRunner().invoke(image_tar.main, [])
    assert (done.exit_code, done.output) == (1, "Error: make image-tar must run as root. Other users run make image\n")
