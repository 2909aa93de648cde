"""Runs processes with the memory limit of their containers in a cluster, if this machine permits cgroups."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.e2e.installation import MANIFESTS

CGROUPS = Path("/sys/fs/cgroup")
UNITS: Mapping[str, int] = {"Mi": 1, "Gi": 1024}


class Version(NamedTuple):
    """A version of cgroups: the directory of its memory controller, and the names of the files in each cgroup."""

    parent: Path
    limit: str
    peak: str
    events: str


VERSIONS = (
    Version(CGROUPS / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"),
    Version(CGROUPS, "memory.max", "memory.peak", "memory.events"),
)


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup for one of our programs. If this machine does not permit cgroups, the program runs without a limit.

    ``limit``: the memory limit in MiB.
    ``version``: the version of the cgroup; None without a cgroup.
    ``missing``: the reason why there is no cgroup.
    """

    limit: int
    version: Version | None = None
    directory: Path = CGROUPS
    missing: str = ""

    def command(self, *program: str | Path) -> Sequence[str | Path]:
        if self.version is None:
            return program
        return ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', self.directory / "cgroup.procs", *program)

    @property
    def peak(self) -> int | None:
        """Return the peak memory of the cgroup in MiB, including page cache. None without a cgroup."""
        return int(self._read(self.version.peak)) // 2**20 if self.version else None

    @property
    def kills(self) -> int:
        found = re.search(r"^oom_kill (\d+)", self._read(self.version.events), re.MULTILINE) if self.version else None
        return int(found[1]) if found else 0

    def _read(self, name: str) -> str:
        return (self.directory / name).read_text()


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Yield a cgroup with a memory limit in MiB. Remove the cgroup when its processes have ended."""
    tried = []
    for version in VERSIONS:
        try:
            directory = _made(version, limit)
        except OSError as error:
            tried.append(str(error))
            continue
        try:
            yield MemoryGroup(limit, version, directory)
        finally:
            directory.rmdir()
        return
    yield MemoryGroup(limit, missing="; ".join(tried))


def _made(version: Version, limit: int) -> Path:
    directory = version.parent / f"vcuda-e2e-{secrets.token_hex(4)}"
    directory.mkdir()
    try:
        (directory / version.limit).write_text(str(limit * 2**20))
    except OSError:
        directory.rmdir()
        raise
    return directory


def memory_limit(manifest: str) -> int:
    """Return the memory limit in MiB of the only container of this Deployment in manifests/base."""
    documents = yaml.safe_load_all((MANIFESTS / manifest).read_text())
    [deployment] = [each for each in documents if each["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    number, unit = re.fullmatch(r"(\d+)(\w+)", container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]
