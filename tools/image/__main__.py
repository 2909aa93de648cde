"""``python -m tools.image``: builds the Dockerfile with buildah, and writes the image into an archive."""

import ast
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tools.image.buildah import CannotBuild, alone, buildah, run
from tools.image.debian import base_image
from vcuda import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
ARCHIVE = ROOT / "build" / "image.tar"
IMAGE = f"vcuda-quota:{__version__}"
"""The image that the manifests name."""

MEGABYTE = 1_000_000


def suite() -> str:
    """Return the release of Debian on which the Dockerfile's own base is built, for example ``bookworm``."""
    [found] = re.findall(r"^ARG BASE=python:.*-(\w+)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def pip_settings() -> dict[str, str]:
    """Return this machine's settings of pip that say how pip reaches a package index."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    # A variable of the environment replaces the same setting of a file.
    settings = (line.partition("=") for line in sorted(lines, key=lambda line: line.startswith(":env:")))
    found = {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, _, value in settings}
    return {name: found[name] for name in ("index-url", "extra-index-url", "trusted-host", "cert") if name in found}


@contextmanager
def home_of_pip() -> Iterator[Path]:
    """Return a context with a home directory in which pip finds its settings. It must be mounted at /root.

    The image does not contain these files, because a mounted directory is not part of an image.
    """
    settings = pip_settings()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        if "cert" in settings:
            shutil.copy(settings["cert"], home / "ca.crt")
            settings["cert"] = "/root/ca.crt"
        (home / ".pip").mkdir()
        lines = "".join(f"{name} = {' '.join(value.splitlines())}\n" for name, value in settings.items())
        (home / ".pip" / "pip.conf").write_text(f"[global]\n{lines}", encoding="utf-8")
        yield home


def layers_of(image: str) -> list[int]:
    """Return the size of each layer of an image in bytes, with the base's layers first."""
    manifest = json.loads(json.loads(buildah("inspect", "--type", "image", image))["Manifest"])
    return [layer["size"] for layer in manifest["layers"]]


def build(base: str, image: str) -> None:
    """Build the image. Of the layers of each stage, keep only the newest for the next build."""
    # The isolation chroot works in a container, too, and RUN has the network of this machine.
    options = ("--isolation=chroot", "--layers", "--pull=false", f"--build-arg=BASE={base}", f"--file={DOCKERFILE}")
    with home_of_pip() as home:
        for stage in (("--target=build", "--tag=localhost/build"), (f"--tag={image}",)):
            buildah("build", *options, *stage, f"--volume={home}:/root:ro", ROOT)
    buildah("rmi", "--prune")


def write_archive(image: str, archive: Path) -> None:
    """Write the image into a file that ``docker load`` and ``ctr images import`` read."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    buildah("push", "--quiet", image, f"docker-archive:{partial}:{image}")
    partial.replace(archive)


@click.command()
@click.option("--base", help="The image for BASE in the Dockerfile. By default it is made of Debian's Python.")
@click.option("--image", default=IMAGE, show_default=True, help="The name of the image in the archive.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=ARCHIVE,
    help="The archive to write; by default build/image.tar.",
)
def main(base: str | None, image: str, output: Path) -> None:
    """Build the image with buildah, and write it into an archive. Without --base, no registry is read."""
    if os.getuid() != 0:
        raise click.ClickException("make image-tar must run as root. Other users run make image")
    try:
        with alone():
            base = base or base_image(suite())
            build(base, image)
            write_archive(image, output)
            sizes, own = layers_of(image), layers_of(image)[len(layers_of(base)) :]
    except CannotBuild as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{output}: {image}, {sum(sizes) / MEGABYTE:.0f} MB, without the base {sum(own) / MEGABYTE:.0f} MB")


if __name__ == "__main__":
    main()
