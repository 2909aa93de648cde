"""The programs that the playground runs. They are built from Go modules, or are found on PATH."""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.control_plane import CONTROLLER_MANAGER, SCHEDULER

ROOT = Path(__file__).parents[2]
KUBERNETES, ETCD, KWOK = "v1.37.2", "v3.6.16", "v0.8.0"
"""The versions of Kubernetes, etcd and kwok that the build scripts build."""

STAGES = "stages"
"""The directory of kwok's stages, next to the program. Stages are files that describe how kwok simulates pods."""

BUILD_TOOLS = "tests/e2e/build-tools"
BUILDS = (("tests/e2e/build-control-plane",), (BUILD_TOOLS, "kwok"))
"""The build commands. Each command builds its programs if necessary, and prints their directory."""

PLUGIN = "kubectl-gpuquota"


class Unusable(Exception):
    """Raised if the playground cannot start on this machine. The message says how to change this."""


@dataclass(frozen=True)
class Program:
    """A program that the playground runs.

    ``name``: the file name of the program.
    ``source``: the text that says how users without Go get the program.
    """

    name: str
    source: str


def _released(name: str) -> Program:
    machine = "arm64" if platform.machine() == "aarch64" else "amd64"
    return Program(name, f"download https://dl.k8s.io/{KUBERNETES}/bin/linux/{machine}/{name} into a directory of PATH")


PROGRAMS = (
    Program("etcd", f"download https://github.com/etcd-io/etcd/releases/tag/{ETCD} into a directory of PATH"),
    *map(_released, ("kube-apiserver", SCHEDULER, CONTROLLER_MANAGER, "kubectl")),
    Program("kwok", f"copy the directory that `{BUILD_TOOLS} kwok` prints on a machine with Go, and add it to PATH"),
    Program("setpriv", "install the package util-linux"),
)
NOT_BUILT = {"setpriv"}
"""The programs that the build scripts do not build."""


@dataclass(frozen=True)
class Programs:
    """The programs that were built or found.

    ``directory``: a directory with a link to each of `PROGRAMS`.
    ``stages``: the files with kwok's stages, which describe how kwok simulates nodes and pods.
    """

    directory: Path
    stages: Sequence[Path]

    def path_of(self, name: str) -> Path:
        return self.directory / name


def provide(directory: Path, env: Mapping[str, str]) -> Programs:
    """Build the programs that were not built before. Create ``directory`` with links to all programs.

    ``env``: the environment variables. PATH and KUBEBUILDER_ASSETS are read.

    Raises Unusable if a build fails, or if programs are missing and cannot be built.
    """
    has_go = shutil.which("go", path=env.get("PATH")) is not None
    built = [printed for command in BUILDS if (printed := _built(command, env, has_go=has_go))]
    found = find([*built, *env.get("PATH", os.defpath).split(os.pathsep)])
    missing = [program for program in PROGRAMS if program.name not in found]
    if missing:
        raise Unusable(missing_text(missing, has_go=has_go, assets=env.get("KUBEBUILDER_ASSETS")))
    directory.mkdir()
    for name, file in found.items():
        (directory / name).symlink_to(file)
    return Programs(directory, sorted((found["kwok"].parent / STAGES).glob("*.yaml")))


def find(path: Sequence[str]) -> dict[str, Path]:
    """Return the programs that were found in the directories ``path``. kwok is left out if its stages are missing."""
    files = {program.name: shutil.which(program.name, path=os.pathsep.join(path)) for program in PROGRAMS}
    found = {name: Path(file).resolve() for name, file in files.items() if file}
    return {name: file for name, file in found.items() if name != "kwok" or (file.parent / STAGES).is_dir()}


def missing_text(missing: Sequence[Program], *, has_go: bool, assets: str | None) -> str:
    """Return the message about missing programs. Its first line has advice, and each other line is about a program."""
    build = "Then `make playground` builds the programs in about 6 minutes."
    if {each.name for each in missing} <= NOT_BUILT:
        advice = "Provide each:"
    elif not has_go:
        advice = f"Install Go 1.26 or later (https://go.dev/dl). {build} Or provide each:"
    else:
        advice = f"Unset KUBEBUILDER_ASSETS, which is {assets}. {build} Or provide each:"
    return "\n".join((f"Some programs are missing. {advice}", *(f"  {each.name}: {each.source}" for each in missing)))


def link_commands(directory: Path, programs: Programs) -> None:
    """Create ``directory`` with links to the commands that a user types: kubectl and its plugin."""
    directory.mkdir()
    (directory / "kubectl").symlink_to(programs.path_of("kubectl").resolve())
    (directory / PLUGIN).symlink_to(Path(sysconfig.get_path("scripts"), PLUGIN))


def _built(command: Sequence[str], env: Mapping[str, str], *, has_go: bool) -> str | None:
    """Return the directory that the build command prints; None if Go is missing and nothing was built before."""
    # The build has its own process group. A signal to this group ends the build with all its compilers.
    build = subprocess.Popen(
        (str(ROOT / command[0]), *command[1:]),
        env={**env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if has_go else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = build.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # The build has already ended.
            os.killpg(build.pid, signal.SIGTERM)
        build.wait()
        raise
    if build.returncode and has_go:
        raise Unusable(f"{command[0]} failed. The output of the command is above this message")
    return None if build.returncode else printed.strip()
