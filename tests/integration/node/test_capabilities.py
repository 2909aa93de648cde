"""The node agent removes what containers leave, whoever they ran as, with no more rights than its manifest gives it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.node.disk import Disk, need_root, uid
from tests.integration.node.test_once import NODE, PROGRAM, listed, pod
from tests.rendered import BASE

CONTAINER_USER = 1000


def capabilities() -> list[str]:
    """What the manifest gives the node agent, as setpriv names it."""
    spec = yaml.safe_load((BASE / "node.yaml").read_text())["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    return [f"+{name.lower()}" for name in container["securityContext"]["capabilities"]["add"]]


def given_to_containers(path: Path, mode: int) -> None:
    """Let the tree be a container's own, with one more directory of this mode that holds a file."""
    inner = path / "main" / "tmp"
    inner.mkdir()
    (inner / "file").touch()
    inner.chmod(mode)
    for each in (path, *path.rglob("*")):
        os.chown(each, CONTAINER_USER, CONTAINER_USER)


@pytest.fixture
def sweep(disk: Disk) -> Callable[[], None]:
    """Sweep once as root that has these capabilities alone; no pod that is left has a directory."""
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
def test_what_a_container_made_as_a_user_of_its_own_goes(disk: Disk, sweep: Callable[[], None], mode: int) -> None:
    given_to_containers(disk.make(uid(1)), mode)
    disk.age(disk.root / uid(1), 7200)
    sweep()
    sweep()
    assert (disk.names(), disk.trash()) == (set(), set())
