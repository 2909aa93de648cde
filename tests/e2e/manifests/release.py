"""A Helm release of the chart, whose objects are applied to a cluster and whose programs run as processes."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.cluster import Cluster, administering
from tests.e2e.manifests.balancer import Balancer, balancing
from tests.e2e.manifests.operations import limit
from tests.e2e.manifests.system import System
from tests.helm import CHART, program
from tests.processes import ControllerProcess
from tools.control_plane import Settings, running_control_plane


@contextmanager
def empty_cluster(assets: Path | None, directory: Path) -> Iterator[Cluster]:
    """Run a control plane without objects of ours, because Helm does not adopt objects that it did not create."""
    # With this flag, the API server calls a Service by its DNS name, which can resolve to this machine.
    settings = Settings(apiserver_flags=("--enable-aggregator-routing=false",), own_identities=True)
    with running_control_plane(assets, directory, settings) as plane, administering(plane) as cluster:
        yield cluster


class Release:
    """A Helm release of a copy of the chart, whose webhook is called at a port of this machine."""

    def __init__(self, admin: Cluster, balancer: Balancer, directory: Path, name: str) -> None:
        self._admin, self._helm, self._directory = admin, program(name), directory
        self.chart = reachable(directory, balancer.port)
        self.system = System(admin, balancer, directory / "rendered", directory, self.chart, name)

    def run(self, command: str, *options: str) -> str:
        done = self.try_run(command, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_run(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (self._helm, *command.split(), "--namespace=kube-system", *options),
            env={**os.environ, "KUBECONFIG": str(self._admin.kubeconfig), "HOME": str(self._directory)},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )

    def install(self, *settings: str) -> str:
        told = self.run(f"install vcuda-quota {self.chart}", *(f"--set={each}" for each in settings))
        target = self._directory / "rendered"
        target.mkdir()
        (target / "all.yaml").write_text(self.run("get manifest vcuda-quota"))
        (target / "kustomization.yaml").write_text(json.dumps({"resources": ["all.yaml"]}))
        return told

    def upgrade(self, *settings: str) -> str:
        return self.run(f"upgrade vcuda-quota {self.chart}", *(f"--set={each}" for each in settings))


def reachable(directory: Path, port: int) -> Path:
    """Return a copy of the chart whose webhooks are called at ``port`` of this machine.

    See `tests.e2e.manifests.system.reachable`.
    """
    chart = Path(shutil.copytree(CHART, directory / "chart"))
    registration, workloads = (chart / "templates" / f"{name}.yaml" for name in ("registration", "workloads"))
    registration.write_text(registration.read_text().replace("port: 443", f"port: {port}"))
    named = r"(kind: Service\nmetadata:\n(?:  .*\n)*?  name: vcuda-webhook\n(?:  .*\n)*)spec:\n(?:  .*\n)*"
    text, changed = re.subn(
        named, r"\g<1>spec: {type: ExternalName, externalName: localhost}" + "\n", workloads.read_text()
    )
    assert changed == 1
    workloads.write_text(text)
    return chart


@contextmanager
def installed_by_helm(admin: Cluster, directory: Path, **flags: str) -> Iterator[tuple[System, ControllerProcess]]:
    """Install a Helm release and run the system. The example quota is in force in a new namespace.

    This does the same as `tests.e2e.manifests.operations.installed`.
    """
    directory.mkdir()
    with balancing() as balancer:
        release = Release(admin, balancer, directory, "helm")
        release.install()
        with release.system.serving(1), release.system.controller(**flags) as controller:
            controller.await_synced()
            limit(admin)
            yield release.system, controller
