"""``python -m tools.release``: writes the files of a release. Two runs for one commit write the same bytes.

The files are built from the last commit, not from the working tree. They are the wheel, the Helm chart, install.yaml,
the list of components (SBOM), the release notes, and the checksums of all these files.
"""

import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from tools import install_yaml
from vcuda import __version__

ROOT = Path(__file__).parents[1]
CHART = "manifests/chart"
SUMS = "SHA256SUMS"
LOCK = "requirements.lock"
BUILD_LOCK = "requirements-build.lock"
# In CI, the checkout may belong to another user. Without safe.directory, git would refuse to read the checkout.
GIT = ("git", "-c", f"safe.directory={ROOT}")


def _run(*command: str | Path, cwd: Path = ROOT, **env: str) -> bytes:
    done = subprocess.run(command, cwd=cwd, capture_output=True, check=False, env={**os.environ, **env})
    if done.returncode:
        raise click.ClickException(f"{' '.join(map(str, command))} failed:\n{done.stderr.decode()}")
    return done.stdout


def source_of(commit: str, target: Path) -> None:
    """Write all files of a commit of the repository into a directory."""
    with tarfile.open(fileobj=io.BytesIO(_run(*GIT, "archive", commit))) as archive:
        archive.extractall(target, filter="data")


def write_wheel(source: Path, target: Path, date: int) -> Path:
    """Build the wheel with build tools at the versions in their lock file. Return the path of the wheel."""
    # When pip builds a wheel from a directory, it rejects constraints with hashes. So the constraints that this
    # function passes to pip have only versions.
    pinned = re.findall(r"^[\w.-]+==[\w.]+", (source / BUILD_LOCK).read_text(), re.MULTILINE)
    constraint = source / "build-constraint.txt"
    constraint.write_text("\n".join(pinned))
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--wheel-dir")
    env = {"SOURCE_DATE_EPOCH": str(date), "PIP_CONSTRAINT": str(constraint)}
    _run(sys.executable, "-m", "pip", "wheel", *options, target, ".", cwd=source, **env)
    [wheel] = target.glob("*.whl")
    return wheel


def _tar_gz(files: Iterable[tuple[str, Path]], date: int) -> bytes:
    """Return a compressed tar archive. All file times are set to ``date``, so equal files give equal bytes.

    ``files``: for each file, the name in the archive and the path.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = path.stat().st_size, date
            archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return gzip.compress(packed.getvalue(), mtime=date)


def write_chart(source: Path, target: Path, version: str, date: int) -> None:
    """Pack the chart as ``helm package`` does, but with a fixed time, so that the archive can be reproduced."""
    paths = (path for path in sorted((source / CHART).rglob("*")) if path.is_file() and path.name != ".helmignore")
    files = ((f"vcuda-quota/{path.relative_to(source / CHART)}", path) for path in paths)
    (target / f"vcuda-quota-{version}.tgz").write_bytes(_tar_gz(files, date))


def write_components(wheel: Path, lock: Path, target: Path) -> None:
    """Write the list of the image's components (SBOM) in the format CycloneDX.

    The components are read from an environment with the packages of the lock file and the wheel.
    """
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory)
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        install = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
        _run(*install, "--require-hashes", "--requirement", lock)
        # pip gets the name of the wheel. If it got the path, the SBOM would contain this path of the build machine.
        _run(*install, "--no-deps", "--no-index", f"--find-links={wheel.parent}", f"vcuda-quota=={__version__}")
        options = ("--output-reproducible", "--output-format=JSON", f"--output-file={target / 'sbom.cdx.json'}")
        _run(sys.executable, "-m", "cyclonedx_py", "environment", *options, python)


def notes_of(changelog: str, version: str) -> str:
    """Return the changelog's section for this version; the section "Unreleased" if the version has none."""
    sections = dict(re.findall(r"^## (\S+).*?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    found: str = sections.get(version) or sections["Unreleased"]
    return found.strip() + "\n"


def sums(target: Path) -> Iterator[str]:
    """Yield the lines of SHA256SUMS."""
    for path in sorted(target.iterdir()):
        if path.name != SUMS:
            yield f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"


@click.command()
@click.option("--version", required=True, help="The version. It must equal the version in vcuda/__init__.py.")
@click.option("--image", required=True, metavar="IMAGE", help="The container image for install.yaml.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "dist",
    help="Directory for the files; must be empty.",
)
def main(version: str, image: str, output: Path) -> None:
    """Write the wheel, the chart, install.yaml, the SBOM, the notes and the checksums of a release."""
    if version != __version__:
        raise click.UsageError(f"--version is {version}, and vcuda/__init__.py has {__version__}: change one of them")
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        raise click.UsageError(f"{output} is not empty: remove it first")
    date = int(_run(*GIT, "log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory)
        source_of("HEAD", source)
        click.echo("wheel")
        wheel = write_wheel(source, output, date)
        click.echo("chart and install.yaml")
        write_chart(source, output, version, date)
        install_yaml.write(image, (), output / "install.yaml", source / "manifests")
        click.echo("components")
        write_components(wheel, source / LOCK, output)
        changelog = (source / "CHANGELOG.md").read_text(encoding="utf-8")
        (output / "NOTES.md").write_text(notes_of(changelog, version), encoding="utf-8")
    (output / SUMS).write_text("".join(sums(output)), encoding="utf-8")
    click.echo((output / SUMS).read_text(encoding="utf-8"), nl=False)


if __name__ == "__main__":
    main()
