"""A kube-scheduler of its own beside the control plane's, with the configuration from the manifests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.e2e.component import Component
from tests.e2e.control_plane import ControlPlane
from tests.e2e.ports import free_ports
from tests.e2e.probe import Probe
from tests.e2e.rest import Json

NAME = "vcuda-scheduler"
COMPONENT = Path(__file__).parents[2] / "manifests" / "components" / "scheduler"

# kubescheduler.config.k8s.io came as v1beta1 in 1.19, was v1beta2 from 1.22, and v1 from 1.25.
VERSIONS = ((25, "v1"), (22, "v1beta2"), (19, "v1beta1"))
LAST_MINOR_WITH_POLICY = LAST_MINOR_WITH_HTTP = 22


def config_file(control_plane: ControlPlane, url: str, ca: Path, directory: Path) -> Path:
    """The manifest's KubeSchedulerConfiguration, but for where the API server, the extender and its CA are."""
    config: Json = yaml.safe_load((COMPONENT / "scheduler-config.yaml").read_text())
    version = next(name for first, name in VERSIONS if control_plane.minor >= first)
    config["apiVersion"] = f"kubescheduler.config.k8s.io/{version}"
    config["clientConnection"] = {"kubeconfig": str(control_plane.kubeconfig)}
    config["leaderElection"] = {"leaderElect": False}
    _point(config, url, ca)
    if control_plane.minor <= LAST_MINOR_WITH_HTTP:
        plain = f"127.0.0.1:{free_ports(1)[0]}"
        config |= {"healthzBindAddress": plain, "metricsBindAddress": plain}
    path = directory / "scheduler-config.json"
    path.write_text(json.dumps(config))
    return path


def policy_file(url: str, ca: Path, directory: Path) -> Path:
    """The manifest's legacy Policy, but for where the extender and its CA are."""
    policy: Json = json.loads((COMPONENT / "policy.json").read_text())
    _point(policy, url, ca)
    path = directory / "policy.json"
    path.write_text(json.dumps(policy))
    return path


def _point(config: Json, url: str, ca: Path) -> None:
    [extender] = config["extenders"]
    extender["urlPrefix"] = f"{url}/scheduler"
    extender["tlsConfig"]["caFile"] = str(ca)


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
