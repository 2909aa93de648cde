"""Writes `kubectl gpuquota` as one file of pure Python, and the manifest of the plugin for krew.

The file is a zip archive that Python can run (zipapp). It contains this project's wheel, and the packages that the
wheel requires without extras. Their versions are those of requirements.lock. Compiled files are left out.
"""

import email.parser
import gzip
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import yaml

NAME = "kubectl-gpuquota"
BINARY = (".so", ".pyd", ".dylib")

# On every machine, pip downloads the wheels for this platform. So the plugin file has the same bytes everywhere.
_PLATFORM = ("--platform=manylinux2014_x86_64", "--python-version=3.11", "--implementation=cp")

# The main program of the plugin file, which prints an error if Python is too old. It imports the plugin's modules only
# after this check, because an old Python cannot compile their syntax.
_MAIN = """\
import sys

if sys.version_info < (3, 11):
    sys.exit("kubectl gpuquota needs Python 3.11 or newer; this is %d.%d" % sys.version_info[:2])
if sys.argv[0].endswith("kubectl_complete-gpuquota"):
    from controller.plugin.complete import main
else:
    from controller.plugin.cli import main
main()
"""

_KREW = {
    "shortDescription": "Show GPU quota, usage and rejections",
    "description": (
        "Shows the GPU quota of a namespace by model, explains whether a manifest would be admitted now,\n"
        "and says why a workload gets no pods. The cluster needs vcuda quota.\n"
    ),
    "caveats": "This plugin needs Python 3.11 or newer as python3.\n",
}


def base_requirements(wheel: Path) -> list[str]:
    """Return the names of the packages that a wheel requires if it is installed without extras."""
    with zipfile.ZipFile(wheel) as archive:
        [path] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = email.parser.Parser().parsestr(archive.read(path).decode()).get_all("Requires-Dist", [])
    return [re.split(r"[^\w.-]", each)[0].lower() for each in required if "extra ==" not in each]


def locked(lock: str, names: list[str]) -> str:
    """Return the entries of the packages ``names`` from a lock file, with the packages' hashes."""
    entries = re.findall(r"^\S+==.*?(?=^\S|\Z)", lock, re.MULTILINE | re.DOTALL)
    return "".join(each for each in entries if each.partition("==")[0] in names)


def write(wheel: Path, lock: str, target: Path, date: int) -> Path:
    """Write the plugin into the directory ``target``. Return the path of the file."""
    with tempfile.TemporaryDirectory() as directory:
        wheels = Path(directory)
        requirements = wheels / "requirements.txt"
        requirements.write_text(locked(lock, base_requirements(wheel)), encoding="utf-8")
        options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", *_PLATFORM, "--dest", wheels)
        command = (sys.executable, "-m", "pip", "download", *options, "--requirement", requirements)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"the packages of {NAME} cannot be downloaded:\n{done.stderr}")
        files = {name: content for path in (wheel, *wheels.glob("*.whl")) for name, content in _pure(path)}
    path = target / NAME
    path.write_bytes(b"#!/usr/bin/env python3\n" + _archive({**files, "__main__.py": _MAIN.encode()}, date))
    path.chmod(0o755)
    return path


def _pure(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a wheel, except compiled files, which are optional in PyYAML."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            # RECORD would be wrong, because it also lists the compiled files of the wheel.
            if not name.endswith(("/", *BINARY, ".dist-info/RECORD")):
                yield name, archive.read(name)


def _archive(files: dict[str, bytes], date: int) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, time.gmtime(date)[:6])
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return written.getvalue()


def tar_gz(files: Iterable[tuple[str, Path]], date: int) -> bytes:
    """Return a compressed tar archive. All file times are set to ``date``, so equal files give equal bytes.

    ``files``: for each file, the name in the archive and the path.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = path.stat().st_size, date, 0o755 if name == NAME else 0o644
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return gzip.compress(packed.getvalue(), mtime=date)


def write_krew(plugin: Path, license_file: Path, version: str, repository: str, date: int) -> None:
    """Write the archive that krew downloads, and the krew manifest, into the directory of the plugin."""
    content = tar_gz([(NAME, plugin), ("LICENSE", license_file)], date)
    file = f"{NAME}-{version}.tar.gz"
    (plugin.parent / file).write_bytes(content)
    manifest = krew_manifest(version, repository, file, hashlib.sha256(content).hexdigest())
    (plugin.parent / "gpuquota.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")


def krew_manifest(version: str, repository: str, file: str, sha256: str) -> dict[str, object]:
    """Return the manifest of https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest."""
    platform = {
        "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]},
        "uri": f"{repository}/releases/download/v{version}/{file}",
        "sha256": sha256,
        "files": [{"from": NAME, "to": "."}, {"from": "LICENSE", "to": "."}],
        "bin": NAME,
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "gpuquota"},
        "spec": {"version": f"v{version}", "homepage": repository, **_KREW, "platforms": [platform]},
    }
