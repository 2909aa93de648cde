"""With only the capabilities of its manifest, the node agent removes files that containers left behind as any user."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.node.disk import Disk, need_root, uid
from tests.integration.node.test_once import NODE, PROGRAM, listed, pod
from tests.rendered import MANIFESTS

CONTAINER_USER = 1000


def capabilities() -> list[str]:
    spec = yaml.safe_load((MANIFESTS / "node-agent/common/daemon-set.yaml").read_text())["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    return [f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]]


def given_to_containers(path: Path, mode: int) -> None:
    inner = path / "main" / "tmp"
    inner.mkdir()
    (inner / "file").touch()
    inner.chmod(mode)
    for each in (path, *path.rglob("*")):
        os.chown(each, CONTAINER_USER, CONTAINER_USER)


@pytest.fixture
def sweep(disk: Disk) -> Callable[[], None]:
    """A function that sweeps the disk once as root, with only the agent's capabilities, on a node without pods."""
    need_root()
    file = disk.base / "pods.json"
    file.write_text(listed(pod(80)))
    bounded = f"--bounding-set={','.join(('-all', *capabilities()))}"
    where = ("--scheme", disk.scheme, "--root", disk.root, "--node", NODE, "--pods", file)
    command = ("setpriv", bounded, "--", PROGRAM, "node", "--once", "--trash-retention", "0", *where)

    def run() -> None:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    return run


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(0o700, id="for its owner alone"),
        pytest.param(0o500, id="not to be written"),
        pytest.param(0o1777, id="sticky: only an owner deletes there"),
    ],
)
def test_files_of_a_containers_own_user_are_removed(disk: Disk, sweep: Callable[[], None], mode: int) -> None:
    given_to_containers(disk.make(uid(1)), mode)
    disk.age(disk.root / uid(1), 7200)
    sweep()
    sweep()
    assert (disk.names(), disk.trash()) == (set(), set())
