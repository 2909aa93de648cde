"""Tests that every command in sh blocks of README, CONTRIBUTING and docs/ is run by a test, or is for people."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.reviews import card_pod
from tests.processes import SCRIPTS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def documented() -> Iterator[tuple[str, str]]:
    """Yield each command as one line without comments, together with the heading of its section."""
    for page in PAGES:
        heading = page.name
        for part in re.split(r"^(##+ .*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            if part.startswith("##"):
                heading = part.lstrip("# ")
            for block in BLOCK.findall(part):
                yield from ((heading, command) for command in commands_of(block))


def commands_of(block: str) -> Iterator[str]:
    text = re.sub(r"(?:^|\s+)# .*$", "", re.sub(r"\\\n\s*", "", block), flags=re.MULTILINE)
    text = re.sub(r" <<EOF\n.*?^EOF$", " <<EOF", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\|\n\s*|(?<={)\n\s*|(?<=},)\n\s*|(?<=\[)\n\s*", lambda found: found[0].strip() + " ", text)
    yield from filter(None, map(str.strip, text.splitlines()))


TABLE = yaml.safe_load((ROOT / "tests/data/documented-commands.yaml").read_text(encoding="utf-8"))
SECTIONS, SAME, PEOPLE = TABLE["sections"], TABLE["same"], TABLE["people"]


def test_every_documented_command_is_typed_by_a_test_or_only_by_people() -> None:
    read = {heading for headings in SECTIONS.values() for heading in headings}
    found = {command for heading, command in documented() if heading not in read}
    listed = [command for commands in (*SAME.values(), *PEOPLE.values()) for command in commands]
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "add these commands to a test, or to `people` with the reason"
    assert set(listed) - {command for _, command in documented()} == set()


@pytest.mark.parametrize("page", ["troubleshooting", "operations", "upgrade"])
def test_a_chapter_with_a_command_for_kustomize_has_one_for_helm(page: str) -> None:
    """On an installation with Helm, the commands for kustomize would overwrite the image and all values."""
    chapters = re.split(r"^## ", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    of_kustomize = [found for found in chapters if any(" -k manifests/" in block for block in BLOCK.findall(found))]
    without = [
        found.partition("\n")[0]
        for found in of_kustomize
        if not any(re.search(r"^ *helm ", block, re.MULTILINE) for block in BLOCK.findall(found))
    ]
    assert without == []


@pytest.mark.parametrize("file", {**SECTIONS, **SAME})
def test_a_file_that_types_commands_exists_and_names_its_sections(file: str) -> None:
    sections, text = SECTIONS.get(file, {}), (ROOT / file).read_text(encoding="utf-8")
    assert [heading for heading in sections if f'"{heading}"' not in text] == []
    lines = Counter(heading for heading, _ in documented())
    assert sections == {heading: lines[heading] for heading in sections}, "does the test type the new commands?"


@pytest.mark.parametrize("command", SAME["tests/integration/test_documented_commands.py"])
def test_an_offline_command_succeeds(command: str, tmp_path: Path) -> None:
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "train"}}
    template = {"spec": card_pod("train", "team-a")["spec"]}
    manifest = {**deployment, "spec": {"replicas": 1, "template": template}}
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(manifest))
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    for name in ("gpuquota.yaml", "edited.yaml"):
        (tmp_path / name).write_text((ROOT / "manifests/examples/gpuquota.yaml").read_text())
    typed = command.replace(".venv/bin/", f"{SCRIPTS}/")
    env = {**os.environ, "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(("sh", "-ec", typed), cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
