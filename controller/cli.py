"""The command ``vcuda-controller``."""

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import click
import structlog
from prometheus_client import CollectorRegistry

from controller import httpd, manager
from controller.elector import Elector, LeaseTiming
from controller.extender import publish, service
from controller.garbage import stale_gc
from controller.garbage.node.cli import node
from controller.settle import charge_ages
from controller.ui.leading import UsagePage, showing
from controller.violations import violation_watcher
from vcuda import __version__, cli, errors, logs, tls
from vcuda.kube import Kube, QuotaPlace, VersionCheck
from vcuda.placement.affinity import NodeLabels

LEADERSHIP_LOST = 1
"""The exit status where the Lease is gone, or a loop has ended by a fault: whoever runs this starts it again."""

Address = tuple[str, int]


@click.group(context_settings=cli.HELP)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Settles the quota ledgers, labels namespaces without a limit, and publishes the usage of the others."""


main.add_command(node)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA"})
@cli.kubeconfig_option
@cli.quota_configmap_option
@cli.quota_key_option
@cli.option(
    "--system-namespace",
    default="vcuda-quota",
    help="Namespace of this system: the Lease, free cards.",
)
@cli.ledger_namespace_option
@cli.model_label_option
@cli.pool_label_option
@cli.option(
    "--identity", default=None, help="Name of this candidate; its own by default.  [host name and a random part]"
)
@cli.option("--lease-seconds", default=30, type=click.IntRange(5, 600), help="How long others wait for a lost leader.")
@cli.storable_option
@cli.option(
    "--full-pass-seconds",
    default=int(charge_ages.SettleTiming().full_resync),
    type=click.IntRange(1),
    help="How often every ledger is compared with the pods; at least twice --storable-seconds.",
)
@cli.option(
    "--max-terminating-seconds",
    default=int(charge_ages.SettleTiming().max_terminating),
    type=click.IntRange(0, 86400),
    help="How long at most a bound pod stays charged that is gone without having ended; else for its grace period.",
)
@cli.option(
    "--allocation-timeout",
    default=int(stale_gc.GcOptions().timeout),
    type=click.IntRange(1, 86400),
    help="Seconds from an allocation by a vendor's scheduler, or its lock on a node, to its being stale.",
)
@cli.option(
    "--dry-run",
    is_flag=True,
    help="Only log which stale allocations and locks would be removed. All the rest is done as ever.",
)
@cli.option(
    "--enforce-audit",
    is_flag=True,
    help="Evict the newest pods beyond an enforced quota. Without it they are only told of.",
)
@cli.option(
    "--audit-period",
    default=int(violation_watcher.ViolationOptions().period),
    type=click.IntRange(1, 86400),
    help="Seconds for which a pod has to be beyond its quota before it is evicted, and after which it is tried again.",
)
@cli.option(
    "--delete-after-evictions",
    default=None,
    type=click.IntRange(1, 1000),
    help="Delete a pod that PodDisruptionBudgets have kept from being evicted so many times. Without it: never.",
)
@cli.status_address_option
@cli.address_option(
    "--ui-address",
    help="Serve the usage page there: read-only, over HTTP, for whoever reaches it. Without it there is none.",
)
@cli.option(
    "--ui-host",
    "ui_hosts",
    multiple=True,
    metavar="NAME",
    help="Name by which browsers reach the usage page, beside localhost and addresses; repeatable.",
)
@cli.address_option(
    "--extender-address", help="Place vcuda pods for kube-scheduler there, over TLS, while leading. Without it: not."
)
@cli.option(
    "--extender-cert-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Holds tls.crt and tls.key of the extender.",
)
@cli.option(
    "--extender-client-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="CAs of client certificates, in PEM: only who shows one of theirs is answered by the extender.",
)
@cli.option(
    "--extender-client-name", default="", help="Common name that kube-scheduler's certificate must have, if any."
)
@cli.address_option(
    "--extender-advertise",
    metavar="IP:PORT",
    parse=cli.parse_ip_address,
    help=f"Where others reach the extender: written to the EndpointSlice of Service {publish.SERVICE} while leading.",
)
@cli.option(
    "--webhook-service",
    default="vcuda-webhook",
    help="Service in the system namespace whose certificate is watched; empty for none.",
)
@cli.log_level_option
def run(
    *,
    kubeconfig: Path | None,
    quota_configmap: tuple[str, str],
    quota_key: str,
    system_namespace: str,
    ledger_namespace: str,
    model_label: str,
    pool_label: str,
    identity: str | None,
    lease_seconds: int,
    storable_seconds: int,
    full_pass_seconds: int,
    max_terminating_seconds: int,
    allocation_timeout: int,
    dry_run: bool,
    enforce_audit: bool,
    audit_period: int,
    delete_after_evictions: int | None,
    status_address: Address,
    ui_address: Address | None,
    ui_hosts: tuple[str, ...],
    extender_address: Address | None,
    extender_cert_dir: Path | None,
    extender_client_ca: Path | None,
    extender_client_name: str,
    extender_advertise: Address | None,
    webhook_service: str,
    log_level: str,
) -> None:
    """Run the controller: any number of them, of which the one that holds the Lease acts.

    It recounts each limited namespace's ledger from the pods that are stored, releases charges of pods that are gone,
    sets the label quota.vcuda.io/enforced to "false" on namespaces without a limit, publishes ConfigMap gpu-quota-usage
    in the others, and lets workloads that were refused for quota try again when some is free.

    It also removes what vendors' schedulers have left behind: allocation annotations on pods that were never bound, are
    bound elsewhere or have ended, and HAMi's locks on nodes. Each removal is an Event on the object. A pod that is
    bound to the node it was allocated on is never touched before it has ended.

    Pods that the quota would not let in (created before it was enforced, or while the webhook was down, or left when it
    was lowered) are told by Events and metrics. With --enforce-audit the newest of them are evicted where the quota is
    enforced, one at a time, as far as PodDisruptionBudgets allow it; with --delete-after-evictions in the end without.

    With --extender-address the leader is an extender of kube-scheduler too, and takes gpu-admission's place: it chooses
    the node and the cards of every pod that asks for tencent.com/ or nvidia.com/vcuda-core, and writes them on the pod.

    \b
    Examples:
      vcuda-controller run
          in a pod, with its service account
      vcuda-controller run --kubeconfig ~/.kube/config --status-address 127.0.0.1:8080
          beside a cluster
      vcuda-controller run --ui-address 127.0.0.1:8088
          shows who uses how much of which model to browsers on this machine; who stands by says who leads
      vcuda-controller run --dry-run --allocation-timeout 600
          leaves stale allocations where they are, and logs those older than ten minutes
      vcuda-controller run --enforce-audit --audit-period 600
          evicts pods that have been beyond their quota for ten minutes
      vcuda-controller run --extender-address 127.0.0.1:10443 --extender-cert-dir certs --extender-client-ca ca.crt
          places pods for a kube-scheduler whose extender has urlPrefix https://127.0.0.1:10443/scheduler

    Exit status: 0 stopped; 1 the lease was lost (start it again), or Kubernetes is too old; 2 bad input.
    """
    timing = _settle_timing(storable_seconds, full_pass_seconds, max_terminating_seconds)
    logs.configure(log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        listening = None
        if extender_address:
            certificate = _mutual_tls(extender_cert_dir, extender_client_ca)
            listening = service.Listening(extender_address, certificate, extender_advertise, extender_client_name)
        # A connection for each thread that may call at once: six watches, the loops, and the extender's requests.
        kube = Kube.connect(kubeconfig, pool_size=16, version_check=VersionCheck(structlog.get_logger().warning))
    except errors.BadInput as error:
        cli.fail(str(error))
    registry, labels = CollectorRegistry(), NodeLabels(model_label, pool_label)
    leader = manager.Leader(
        kube,
        QuotaPlace(*quota_configmap, quota_key),
        system_namespace,
        labels,
        registry,
        on_fault=_end,
        ledger_namespace=ledger_namespace,
        timing=timing,
        gc=stale_gc.GcOptions(timeout=allocation_timeout, dry_run=dry_run),
        violations=violation_watcher.ViolationOptions(audit_period, enforce_audit, delete_after_evictions),
        listening=listening,
        webhook_service=webhook_service,
    )
    # Two candidates of one name would each take the other's Lease for its own: hence the random part.
    own_name = identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    lease = (system_namespace, "vcuda-controller")
    elector = Elector(kube, lease, own_name, timing=LeaseTiming.of(lease_seconds), wait=stop.wait)
    page = UsagePage(lambda: elector.holder, ui_hosts)
    leading = _serve_page(ui_address, page, kube, labels, leader)
    sys.exit(_lead(elector, leader, status_address, registry, leading))


@contextmanager
def _listening_for(flag: str, address: Address) -> Iterator[None]:
    """Tell of an address that cannot be had as bad input of this flag."""
    try:
        yield
    except OSError as error:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        raise click.BadParameter(f"{host}:{address[1]}: {error.strerror or error}.", param_hint=flag) from error


def _serve_page(
    address: Address | None, page: UsagePage, kube: Kube, labels: NodeLabels, leader: manager.Leader
) -> Callable[[], AbstractContextManager[None]]:
    """Serve the usage page, where that is asked for; return what has it show the leader for as long as it leads."""
    if address is None:
        return nullcontext
    with _listening_for("--ui-address", address):
        server = page.serve(address)
    structlog.get_logger().info("serving the usage page", port=server.port)
    return lambda: showing(page, kube, labels, leader)


def _lead(
    elector: Elector,
    leader: manager.Leader,
    address: Address,
    registry: CollectorRegistry,
    leading: Callable[[], AbstractContextManager[None]],
) -> int:
    """Wait for the lease, act while it is held, and end with it."""
    started = threading.Event()
    with _listening_for("--status-address", address):
        # A candidate that stands by is healthy and ready: a rollout waits for it, and need not wait until it leads.
        server = httpd.serve_status(
            address,
            registry,
            healthy=lambda: leader.trouble() if started.is_set() else None,
            ready=lambda: None if not started.is_set() or leader.ready else "the first list is not complete",
        )
    structlog.get_logger().info("serving status", port=server.port)
    if not elector.acquire():
        return 0
    leader.start()
    started.set()
    with leading():
        # Lost means that another may lead by now: the writes under way must not go on, not even for a clean stop.
        if not elector.hold():
            _end()
    leader.stop()
    elector.release()  # after the last write, so that the next leader begins on a cluster that nobody else changes
    return 0


def _mutual_tls(certificate: Path | None, client_ca: Path | None) -> tls.ServingCertificate:
    """Return the extender's certificate; raises BadInput where there is no good one, or no CA of clients."""
    if certificate is None:
        raise click.UsageError("--extender-address wants --extender-cert-dir too: kube-scheduler calls it over TLS.")
    if client_ca is None:
        raise click.UsageError("--extender-address wants --extender-client-ca too: it answers kube-scheduler alone.")
    return tls.ServingCertificate(certificate, client_ca, client_required=True)


def _settle_timing(storable: int, full_pass: int, max_terminating: int) -> charge_ages.SettleTiming:
    # The settler forgets with time since when each charge has been pending: none before it is known to be overdue.
    if full_pass < 2 * storable:
        message = f"{full_pass} is less than twice --storable-seconds, {storable}."
        raise click.BadParameter(message, param_hint="--full-pass-seconds")
    return charge_ages.SettleTiming(pending_ttl=storable, full_resync=full_pass, max_terminating=max_terminating)


def _end() -> None:
    """End the process at once, without cleaning up: with the lease, or a loop, gone, nothing that runs may act."""
    os._exit(LEADERSHIP_LOST)
