"""Makes a base image of Debian's Python, for machines that cannot read a registry.

The base has the layout of the official image of Python that the Dockerfile names: ``python`` and pip are in /usr/local.
It is for tests, because it has no security updates.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.image.buildah import CannotBuild, buildah, run

PATH = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
INSTALLERS = ("python3-venv", "python3.11-venv", "python3-pip-whl", "python3-setuptools-whl")
"""Debian's packages with pip. They are removed after pip has been installed in /usr/local."""

LEFT_OUT = (
    *("usr/share/doc", "usr/share/info", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists"),
    *("var/log", "etc/apt/sources.list", "etc/hostname", "etc/resolv.conf"),
)
"""Files that the base image does not need: documentation, and files in which debootstrap describes this machine."""


def base_image(suite: str) -> str:
    """Return the name of the base image of a release of Debian, for example ``bookworm``. The first call makes it."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    name = f"localhost/debian-python:{suite}-{recipe}"
    if name not in buildah("images", "--format", "{{.Name}}:{{.Tag}}").splitlines():
        with new_container() as (container, root):
            run("debootstrap", "--variant=minbase", f"--include={INSTALLERS[0]}", suite, root, mirror())
            move_python(root)
            buildah("config", "--env", PATH, "--cmd", "python3", container)
            buildah("commit", "--quiet", container, name)
    return name


@contextmanager
def new_container() -> Iterator[tuple[str, Path]]:
    """Return a context with the name and the root directory of a new container without files."""
    container = buildah("from", "scratch")
    try:
        yield container, Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def mirror() -> str:
    """Return the address of the mirror of Debian from which this machine installs packages."""
    described = run("apt-get", "indextargets", "--format", "$(LABEL) $(COMPONENT) $(REPO_URI)", "Created-By: Packages")
    for line in described.splitlines():
        label, component, address = line.split(" ", 2)
        if (label, component) == ("Debian", "main"):
            return address
    raise CannotBuild("apt-get knows no mirror of Debian. Run apt-get update, or name a base image with BASE=IMAGE")


def move_python(root: Path) -> None:
    """Install pip into /usr/local of the base as in the official image, and remove Debian's packages with pip."""
    run("chroot", root, "python3", "-m", "venv", "/usr/local")
    [bundled] = root.glob("usr/lib/python3.*/ensurepip")
    shutil.move(bundled, root / "usr" / "local" / "lib" / bundled.parent.name)
    run("chroot", root, "dpkg", "--purge", *INSTALLERS)
    for name in LEFT_OUT:
        left_out = root / name
        if left_out.is_dir():
            shutil.rmtree(left_out)
        else:
            left_out.unlink(missing_ok=True)
