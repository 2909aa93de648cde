"""The command ``vcuda-controller``."""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import uuid
from pathlib import Path

import click
import structlog
from prometheus_client import CollectorRegistry

from controller.elector import Elector, Terms
from controller.leader import Leader
from controller.settler import Times
from controller.status_server import serve_status
from vcuda import __version__
from vcuda.errors import BadInput
from vcuda.kube import Kube, QuotaPlace
from vcuda.logs import configure
from vcuda.placement import NodeLabels

BAD_INPUT = 2
LOST = 1

_LABELS = NodeLabels()
_option = functools.partial(click.option, show_envvar=True, show_default=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Settles the quota ledgers, labels limited namespaces, and publishes their usage."""


@main.command(context_settings={"auto_envvar_prefix": "VCUDA"})
@_option("--kubeconfig", type=click.Path(dir_okay=False, path_type=Path), help="Without it: the pod's service account.")
@_option("--quota-configmap", default="kube-system/gpuquota", metavar="NS/NAME", help="ConfigMap that holds the quota.")
@_option("--quota-key", default="gpu_quota", help="Its key.")
@_option("--system-namespace", default="vcuda-quota", help="Namespace of this system: ledgers and the Lease.")
@_option("--model-label", default=_LABELS.model, help="Node label that holds a node's GPU model.")
@_option("--pool-label", default=_LABELS.pool, help="Node label that holds a node's pool.")
@_option("--identity", default=None, help="Name of this candidate; its own by default.  [host name and a random part]")
@_option("--lease-seconds", default=30, type=click.IntRange(5, 600), help="How long others wait for a lost leader.")
@_option(
    "--storable-seconds",
    default=int(Times().storable),
    type=click.IntRange(1, 3600),
    help="How long after its admission a pod may still be stored; more than the API server's --request-timeout.",
)
@_option("--status-address", default="0.0.0.0:8080", metavar="HOST:PORT", help="/healthz, /readyz and /metrics.")
@_option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
def run(
    *,
    kubeconfig: Path | None,
    quota_configmap: str,
    quota_key: str,
    system_namespace: str,
    model_label: str,
    pool_label: str,
    identity: str | None,
    lease_seconds: int,
    storable_seconds: int,
    status_address: str,
    log_level: str,
) -> None:
    """Run the controller: any number of them, of which the one that holds the Lease acts.

    It recounts each limited namespace's ledger from the pods that are stored, releases charges of pods that are gone,
    sets the label quota.vcuda.io/enforced on limited namespaces, publishes ConfigMap gpu-quota-usage in each, and
    lets workloads that were refused for quota try again when some is free.

    \b
    Examples:
      vcuda-controller run
          in a pod, with its service account
      vcuda-controller run --kubeconfig ~/.kube/config --status-address 127.0.0.1:8080
          beside a cluster

    Exit status: 0 stopped, 1 the lease was lost (start it again), 2 bad input.
    """
    configure(log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    namespace, slash, name = quota_configmap.partition("/")
    if not (namespace and slash and name):
        raise click.BadParameter(f"{quota_configmap!r} is not NAMESPACE/NAME.", param_hint="--quota-configmap")
    try:
        kube = Kube.connect(kubeconfig, pool_size=16)
    except BadInput as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(BAD_INPUT)
    registry = CollectorRegistry()
    place, labels = QuotaPlace(namespace, name, quota_key), NodeLabels(model_label, pool_label)
    times = Times(storable=storable_seconds)
    leader = Leader(kube, place, system_namespace, labels, registry, on_fault=_end, times=times)
    terms = Terms(lease_seconds, lease_seconds * 2 / 3, min(2.0, lease_seconds / 5))
    own_name = identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    elector = Elector(kube, (system_namespace, "vcuda-controller"), own_name, terms=terms, wait=stop.wait)
    sys.exit(_lead(elector, leader, _address(status_address), registry))


def _lead(elector: Elector, leader: Leader, address: tuple[str, int], registry: CollectorRegistry) -> int:
    """Wait for the lease, act while it is held, and end with it."""
    started = threading.Event()
    port = serve_status(
        address,
        registry,
        healthy=lambda: None if not started.is_set() or leader.alive() else "a watch has ended",
        ready=lambda: None if not started.is_set() or leader.synced else "the first list is not complete",
    )
    structlog.get_logger().info("serving status", port=port)
    if not elector.acquire():
        return 0
    leader.start()
    started.set()
    if not elector.hold():
        _end()
    leader.stop()
    elector.release()
    return 0


def _end() -> None:
    """End the process at once: with the lease, or a loop, gone, nothing that still runs may act."""
    os._exit(LOST)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit():
        raise click.BadParameter(f"{text!r} is not HOST:PORT.", param_hint="--status-address")
    return host.strip("[]"), int(port)
