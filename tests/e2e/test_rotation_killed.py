"""Tests that a rotation of certificates that is killed repeatedly still completes, and exposes no private key."""

import base64
import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from certs.parsing import read_certificates
from tests.e2e.cluster import Cluster
from tests.e2e.lossy_proxy import Losses, lossy_proxy
from tests.e2e.stage import CA_SECRET, SERVING_SECRET, staged, unnoticed, utc_now

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

SHORT = ("--overlap", "1s", "--retention", "1s", "--timeout", "60s")


@dataclass(frozen=True)
class Life:
    """A run of the rotation that has ended.

    ``visible``: the command line and the environment of its process.
    """

    status: int
    printed: str
    visible: str


@dataclass
class Fatal(Losses):
    """Kills the process ``victim`` at its first write. The API server has performed the write, and its answer is lost.

    The caller must set ``victim`` when the process has started.
    """

    victim: int = 0

    def takes(self, method: str, path: str) -> bool:
        with self._lock:
            if method == "GET":
                return False
            self.lost.append((method, path))
            os.kill(self.victim, signal.SIGKILL)
            return True


@pytest.mark.timeout(400)
def test_a_rotation_killed_at_each_write_in_turn_still_completes_and_fails_no_create(
    cluster: Cluster, tmp_path: Path
) -> None:
    """No process exposes a private key in its output, command line, environment or files."""
    fatal = Fatal()
    shown: list[str] = []
    delays = (lambda: 0.0, lambda: 2.0)
    (tmp_path / "home").mkdir()
    with (
        staged(cluster, tmp_path / "volumes", delays, cluster.kubeconfig, *SHORT) as (stage, quota),
        stage.team(quota) as namespace,
        lossy_proxy(cluster, tmp_path / "proxy", fatal) as proxy,
    ):
        old, keys, since = set(stage.bundles()), set(private_keys(cluster)), utc_now()
        with unnoticed(stage, namespace):
            command = stage.command("rotate", "--issued-before", since, kubeconfig=proxy)
            for ended in lives(command, fatal, tmp_path / "home"):
                shown += [ended.printed, ended.visible]
                keys |= set(private_keys(cluster))
        assert len(fatal.lost) >= 9
        [bundle] = set(stage.bundles())
        assert len(read_certificates(base64.b64decode(bundle))[0]) == 1
        assert {bundle} & old == set()
        assert set(data_of(cluster, CA_SECRET)) == {"ca.crt", "ca.key"}
        assert "Done" in stage.rotate("--issued-before", since)
        everything = "".join([*shown, *(replica.output() for replica in stage.replicas), events(cluster)])
        assert [key for key in keys if key in everything] == []
        assert len(keys) >= 4
        assert list((tmp_path / "home").rglob("*")) == []
        assert world_readable_keys(tmp_path / "volumes") == []


def lives(command: list[str], fatal: Fatal, home: Path) -> Iterator[Life]:
    """Yield runs of the rotation until one ends by itself. The earlier runs are killed at their first write."""
    while True:
        life = live(command, fatal, home)
        yield life
        if life.status != -signal.SIGKILL:
            assert life.status == 0, life.printed
            return


def live(command: list[str], fatal: Fatal, home: Path) -> Life:
    """Run the rotation with a small environment and an empty home directory, and return the ended run."""
    own = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=home, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        fatal.victim = process.pid
        visible = [Path(f"/proc/{process.pid}/{part}").read_text() for part in ("cmdline", "environ")]
        printed, _ = process.communicate(timeout=120)
    return Life(process.returncode, printed, "".join(visible))


def private_keys(cluster: Cluster) -> Iterator[str]:
    """Yield a part of every private key in the two Secrets. By this part, a test can find the key in other texts."""
    for path in (CA_SECRET, SERVING_SECRET):
        for name, text in data_of(cluster, path).items():
            if name.endswith(".key"):
                yield base64.b64decode(text).decode().splitlines()[1][-40:]


def data_of(cluster: Cluster, path: str) -> dict[str, str]:
    data: dict[str, str] = cluster.rest.get(path)["data"]
    return data


def events(cluster: Cluster) -> str:
    return json.dumps(cluster.rest.get("/api/v1/events")["items"])


def world_readable_keys(directory: Path) -> list[Path]:
    files = [path for path in directory.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
    assert files
    return [path for path in files if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]
