"""Runs a second kube-scheduler: that of the manifests, or one whose extender acts like gpu-admission."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import yaml

from tests.e2e.cluster import Json
from tests.e2e.installation import CLIENT
from tests.e2e.json_server import answering
from tools.component import Component, Probe
from tools.control_plane import ControlPlane
from tools.ports import free_ports
from vcuda.tls import LEAF_CERTIFICATE, LEAF_KEY

NAME = "vcuda-scheduler"
PREDICATING = "predicating"
"""The schedulerName of pods for the scheduler whose extender acts like gpu-admission."""

REJECTION = "had been predicated!"
MARKS = ("predicate-time", "gpu-assigned", "predicate-gpu-idx-")
COMPONENT = Path(__file__).parents[2] / "manifests" / "components" / "scheduler"


class Credentials(NamedTuple):
    """Files of the scheduler: the CA of the extender's certificate, and its own client certificate with the key."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def beside(cls, ca: Path) -> Self:
        return cls(ca, *(ca.parent / CLIENT / name for name in (LEAF_CERTIFICATE, LEAF_KEY)))


def config_file(
    control_plane: ControlPlane, url: str, credentials: Credentials, directory: Path, **fields: object
) -> Path:
    """Write the manifest's KubeSchedulerConfiguration with the API server and the extender of this test.

    Return the path of the written file. ``fields``: more fields of the extender's entry.
    """
    config: Json = yaml.safe_load((COMPONENT / "scheduler-config.yaml").read_text())
    [extender] = config["extenders"]
    extender["urlPrefix"] = f"{url}/scheduler"
    keys = ("caFile", "certFile", "keyFile")
    assert extender["tlsConfig"].keys() == {*keys}
    extender["tlsConfig"] = dict(zip(keys, map(str, credentials), strict=True))
    extender |= fields
    return written(control_plane, config, directory)


def written(control_plane: ControlPlane, config: Json, directory: Path) -> Path:
    own = {"clientConnection": {"kubeconfig": str(control_plane.kubeconfig)}, "leaderElection": {"leaderElect": False}}
    kind = {"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration"}
    path = directory / "scheduler-config.json"
    path.write_text(json.dumps({**kind, **config, **own}))
    return path


@contextmanager
def scheduling(control_plane: ControlPlane, *flags: str) -> Iterator[Component]:
    [port] = free_ports(1)
    certs = control_plane.directory / "certs-vcuda-scheduler"
    common = ("--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={certs}")
    log = control_plane.directory / f"{NAME}-{port}.log"
    ready = Probe(port, "/healthz", certs / "kube-scheduler.crt")
    command = (str(control_plane.assets / "kube-scheduler"), *common, *flags)
    scheduler = Component(NAME, command, log, ready, control_plane.settings.startup_timeout)
    with scheduler.started():
        yield scheduler


def predicate(asked: Json) -> Json:
    """Return an ExtenderFilterResult (k8s.io/kube-scheduler ``extender/v1``) as gpu-admission does.

    A pod with gpu-admission's annotations gets no node. Any other pod gets the first of the offered nodes.
    """
    pod, nodes = asked["Pod"], asked["Nodes"]
    if any(mark in key for key in pod["metadata"].get("annotations", {}) for mark in MARKS):
        return {"Error": f"pod {pod['metadata']['name']} {REJECTION}"}
    return {"Nodes": {**nodes, "items": nodes["items"][:1]}, "FailedNodes": {}, "Error": ""}


@contextmanager
def extended_scheduler(
    control_plane: ControlPlane, directory: Path, name: str, decide: Callable[[Json], Json], **fields: object
) -> Iterator[None]:
    """Run a second scheduler for the pods that name it. Its extender answers each filter request by ``decide``.

    ``directory``: a new directory for its files. ``fields``: more fields of the extender's entry.
    """
    with answering(lambda _, asked: decide(asked)) as url:
        extenders = [{"urlPrefix": url, "filterVerb": "filter", **fields}]
        profile = {"profiles": [{"schedulerName": name}], "extenders": extenders}
        with scheduling(control_plane, f"--config={written(control_plane, profile, directory)}"):
            yield
