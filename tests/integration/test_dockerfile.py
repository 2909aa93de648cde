"""Tests of the text of the Dockerfile. `make image-tar` builds the image, which tests/image tests."""

import json
import subprocess
import sys

from tests.processes import DOCKERFILE, SCRIPTS

Stage = list[tuple[str, str]]
"""The instructions of a stage of the Dockerfile, each with its text."""


def stages() -> list[Stage]:
    """Return the instructions before the first stage, and the instructions of each stage."""
    found: list[Stage] = [[]]
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


def test_hadolint_finds_no_fault() -> None:
    done = subprocess.run((SCRIPTS / "hadolint", DOCKERFILE), capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_both_stages_have_the_base_that_a_builder_may_choose() -> None:
    arguments, build, final = stages()
    [base] = texts(arguments, "ARG")
    assert base.startswith(f"BASE=python:{sys.version_info.major}.{sys.version_info.minor}-")
    assert (texts(build, "FROM"), texts(final, "FROM")) == (["${BASE} AS build"], ["${BASE}"])


def test_only_the_environment_is_copied_from_the_build_and_it_runs_as_a_numeric_non_root_user() -> None:
    """The manifests name the program to run, so the image has no ENTRYPOINT."""
    _, _, final = stages()
    assert texts(final, "COPY") == ["--from=build /opt/vcuda /opt/vcuda"]
    assert texts(final, "USER") == ["65532:65532"]
    assert texts(final, "ENTRYPOINT") == []
    assert json.loads(texts(final, "CMD")[0])[0] == "vcuda-webhook"
