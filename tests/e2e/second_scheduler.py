"""A kube-scheduler of its own beside the control plane's, with the configuration from the manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.e2e.control_plane import Component, ControlPlane, Probe
from tests.e2e.rest import Json
from tests.processes import free_ports

NAME = "vcuda-scheduler"
COMPONENT = Path(__file__).parents[2] / "manifests" / "components" / "scheduler"


def config_file(control_plane: ControlPlane, url: str, ca: Path, directory: Path, **fields: object) -> Path:
    """The manifest's KubeSchedulerConfiguration, but for where the API server, the extender and its CA are.

    ``fields`` are further ones of the extender.
    """
    config: Json = yaml.safe_load((COMPONENT / "scheduler-config.yaml").read_text())
    config["clientConnection"] = {"kubeconfig": str(control_plane.kubeconfig)}
    config["leaderElection"] = {"leaderElect": False}
    [extender] = config["extenders"]
    extender["urlPrefix"] = f"{url}/scheduler"
    extender["tlsConfig"]["caFile"] = str(ca)
    extender |= fields
    path = directory / "scheduler-config.json"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def scheduling(control_plane: ControlPlane, *flags: str) -> Iterator[Component]:
    """A kube-scheduler with these flags, serving; stopped at the end of the block."""
    [port] = free_ports(1)
    certs = control_plane.directory / "certs-vcuda-scheduler"
    common = ("--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={certs}")
    log = control_plane.directory / f"{NAME}-{port}.log"
    ready = Probe(port, "/healthz", certs / "kube-scheduler.crt")
    command = (str(control_plane.assets / "kube-scheduler"), *common, *flags)
    scheduler = Component(NAME, command, log, ready, control_plane.settings.startup_timeout)
    try:
        scheduler.start()
        yield scheduler
    finally:
        scheduler.stop()
