"""The command ``vcuda-controller node``, the agent that deletes directories of deleted pods from a GPU node."""

import queue
import signal
from pathlib import Path

import click
import structlog
from prometheus_client import CollectorRegistry

from controller.garbage.node import age, agent, names
from controller.garbage.node.pods import ApiPods, Evidence
from controller.garbage.node.sweep import NodeSweep
from controller.httpd import serve_status
from vcuda import errors, logs
from vcuda.cli import (
    FiniteRange,
    fail,
    kubeconfig_option,
    listening_for,
    log_level_option,
    option,
    status_address_option,
)
from vcuda.kube import Kube, VersionCheck

_directory = click.Path(path_type=Path)


@click.command(context_settings={"auto_envvar_prefix": "VCUDA"})
@option("--scheme", required=True, type=click.Choice(list(names.VM_DIRECTORIES)), help="Vendor of the directories.")
@option("--node", required=True, metavar="NAME", help="Name of this node.")
@option("--root", type=_directory, help="Directory that contains the pods' directories.  [default: by scheme]")
@option("--kubelet-pods", type=_directory, default="/var/lib/kubelet/pods", help="kubelet's directory of pods.")
@option("--pod-uid", required=True, metavar="UID", help="Uid of the agent's own pod, which both lists must include.")
@option("--grace", default=300.0, type=FiniteRange(0), metavar="SECONDS", help="Minimum age of a deleted directory.")
@option("--dry-run", is_flag=True, help="Log the actions, and change nothing.")
@kubeconfig_option
@option("--period", default=60.0, type=FiniteRange(0.1, 86400), metavar="SECONDS", help="Time between sweeps.")
@status_address_option
@log_level_option
def node(
    *,
    scheme: str,
    node: str,
    root: Path | None,
    kubelet_pods: Path,
    pod_uid: str,
    grace: float,
    dry_run: bool,
    kubeconfig: Path | None,
    period: float,
    status_address: tuple[str, int],
    log_level: str,
) -> None:
    """Delete the vendors' directories of deleted pods from this node.

    A device plugin makes one directory per pod in --root. The agent deletes such a directory if the name has the form
    of the scheme and the pod does not exist. Two consecutive sweeps must find the directory without a pod in the API
    and in kubelet's directory of pods, the first one --grace ago or earlier. Then the agent lists the pods again, reads
    kubelet's directory again, and deletes the directory. kubelet removes its directory of a pod only after the pod's
    containers have ended. If the API server cannot be reached, or kubelet's directory does not have the agent's own
    pod, the agent deletes nothing.

    The agent writes only to --root, and reads /var/lib/kubelet/pods. Mount only these two directories of the host, both
    with mountPropagation HostToContainer, and /var/lib/kubelet/pods read-only.

    \b
    Example, the command of the DaemonSet:
      vcuda-controller node --scheme gpu-manager --node $NODE --pod-uid $UID

    Exit status: 0 stopped; 1 Kubernetes is too old; 2 bad input.
    """
    logs.configure(log_level)
    log = structlog.get_logger()
    try:
        kube = Kube.connect(kubeconfig, version_check=VersionCheck(log.warning))
    except errors.BadInput as error:
        fail(str(error))
    stop: queue.SimpleQueue[None] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.put(None))
    form = names.VM_DIRECTORIES[scheme]
    evidence = Evidence(ApiPods(kube, node), kubelet_pods, pod_uid)
    sweep = NodeSweep(root or Path(form.root), form, evidence, age.ObservedAge(grace), dry_run)
    registry = CollectorRegistry()
    sweeping = agent.Agent(sweep.run, agent.SweepReporter(registry), stop, period)
    with listening_for("--status-address", status_address):
        server = serve_status(
            status_address,
            registry,
            healthy=sweeping.unhealthy,
            ready=lambda: None if sweeping.ready else "no sweep has read the pods of the node",
        )
    log.info("serving status", port=server.port)
    sweeping.loop()
    log.info("stopped")
