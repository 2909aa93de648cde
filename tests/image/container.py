"""Runs commands in containers of the image by runc, with a read-only root and without rights, as in the manifests."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Json = dict[str, Any]

NAMESPACES = ("pid", "mount", "ipc", "uts")
"""Not network: a test calls the server of a container on 127.0.0.1."""

SYSTEM_MOUNTS: list[Json] = [
    {"destination": "/proc", "type": "proc", "source": "proc"},
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},  # noqa: S108
]


class Image(NamedTuple):
    """The image in a mounted container.

    ``root``: the directory with the files of the image. ``config``: the part of the image's configuration that a
    container engine uses, for example its ``User``.
    """

    root: Path
    config: Json

    def paths(self) -> list[Path]:
        """Return the paths of all files and directories, relative to the root."""
        return sorted(found.relative_to(self.root) for found in self.root.rglob("*"))

    def command(self, directory: Path, *arguments: str, mounts: Mapping[str, Path] | None = None) -> list[str]:
        """Return the command that runs ``arguments`` in a new container.

        ``directory``: an empty directory for the files of runc. ``mounts``: directories of this machine that the
        container may write to, by their paths in the container.
        """
        user, group = map(int, self.config["User"].split(":"))
        process = {
            "user": {"uid": user, "gid": group},
            "args": arguments,
            "env": self.config["Env"],
            "cwd": "/",
            "capabilities": {each: [] for each in ("bounding", "effective", "inheritable", "permitted", "ambient")},
            "noNewPrivileges": True,
        }
        binds = [
            {"destination": there, "type": "bind", "source": str(here), "options": ["bind", "nosuid", "nodev"]}
            for there, here in (mounts or {}).items()
        ]
        whole = {
            "ociVersion": "1.0.2",
            "process": process,
            "root": {"path": str(self.root), "readonly": True},
            "mounts": [*SYSTEM_MOUNTS, *binds],
            "linux": {"namespaces": [{"type": each} for each in NAMESPACES]},
        }
        (directory / "config.json").write_text(json.dumps(whole))
        name = f"vcuda-{os.getpid()}-{directory.name}"
        return ["runc", "--root", str(directory / "state"), "run", "--bundle", str(directory), name]

    def run(
        self, directory: Path, *arguments: str, mounts: Mapping[str, Path] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = self.command(directory, *arguments, mounts=mounts)
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
