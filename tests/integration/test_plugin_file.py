"""The single file of the plugin `kubectl gpuquota`: only Python code, locked packages, krew manifest, completion."""

import hashlib
import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plugin import DATE, write_plugin, write_python
from tools import plugin_file, release
from vcuda import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = "https://git.example/team/vcuda-quota"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plugin(tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("source"))


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
        exec(checked.replace("import sys", ""), {"sys": OldPython})  # noqa: S102  # the test runs our own file
    compile(text, "__main__.py", "exec", dont_inherit=True)


class OldPython:
    """A replacement of the module sys that reports Python 3.9."""

    version_info = (3, 9, 6)

    @staticmethod
    def exit(message: str) -> None:
        raise SystemExit(message)


def manifest_of(plugin: Path, tmp_path: Path) -> Mapping[str, Any]:
    (tmp_path / plugin.name).write_bytes(plugin.read_bytes())
    plugin_file.write_krew(tmp_path / plugin.name, release.ROOT / "LICENSE", __version__, REPOSITORY, DATE)
    found: Mapping[str, Any] = yaml.safe_load((tmp_path / "gpuquota.yaml").read_text())
    return found


def test_krew_finds_what_its_manifest_promises(plugin: Path, tmp_path: Path) -> None:
    [platform] = manifest_of(plugin, tmp_path)["spec"]["platforms"]
    file = tmp_path / platform["uri"].rpartition("/")[2]
    assert platform["uri"] == f"{REPOSITORY}/releases/download/v{__version__}/{file.name}"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == platform["sha256"]
    with tarfile.open(file) as archive:
        modes = {member.name: member.mode for member in archive.getmembers()}
    assert modes == {"kubectl-gpuquota": 0o755, "LICENSE": 0o644}
    assert [each["from"] for each in platform["files"]] == [*modes]
    assert platform["bin"] in modes


def test_the_manifest_has_the_fields_that_krew_documents(plugin: Path, tmp_path: Path) -> None:
    """See krew.sigs.k8s.io/docs/developer-guide/plugin-manifest."""
    manifest = manifest_of(plugin, tmp_path)
    assert {*manifest} == {"apiVersion", "kind", "metadata", "spec"}
    assert (manifest["apiVersion"], manifest["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    # Krew requires that the plugin has the name of its manifest file. This name is also the command after `kubectl`.
    assert manifest["metadata"] == {"name": "gpuquota"}
    spec = manifest["spec"]
    assert {*spec} == {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    assert "\n" not in spec["shortDescription"]
    [platform] = spec["platforms"]
    assert {*platform} == {"selector", "uri", "sha256", "files", "bin"}
    assert re.fullmatch(r"[a-f0-9]{64}", platform["sha256"])
    assert platform["selector"] == {
        "matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]
    }
    assert all({*each} == {"from", "to"} for each in platform["files"])


def test_only_the_locked_entries_of_the_base_are_downloaded() -> None:
    lock = "# head\na==1 \\\n    --hash=sha256:1\n    # via b\nb==2 \\\n    --hash=sha256:2\n    # via x\n"
    assert plugin_file.locked(lock, ["b"]) == "b==2 \\\n    --hash=sha256:2\n    # via x\n"
