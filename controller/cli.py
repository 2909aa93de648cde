"""The command line of the controller: ``vcuda-controller run`` and ``vcuda-controller uninstall``."""

import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import click
import structlog
from prometheus_client import CollectorRegistry

from controller import httpd, manager, metrics
from controller.elector import Elector, LeaseTiming
from controller.extender import service
from controller.garbage.node.cli import node
from controller.recount import charge_ages
from controller.ui.leading import SERVICE, LeaderSource, UsagePage, advertising
from controller.uninstall import Uninstall
from vcuda import __version__, cli, errors, logs, tls
from vcuda.kube import AuthorizerGrace, Kube, VersionCheck

LEADERSHIP_LOST = 1
"""The exit status after the Lease was lost or a loop failed. Kubelet then restarts the container."""


def _web_address(_context: click.Context, parameter: click.Parameter, text: str) -> str:
    # The usage page links to this URL, so it must use http or https. A javascript: URL could run code in the browser.
    if text and not text.startswith(("https://", "http://")):
        raise click.BadParameter(f"{text!r} must start with https:// or http://.", param_hint=parameter.opts[0])
    return text


@click.group(context_settings=cli.HELP)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Recount quota ledgers, publish usage, retry rejected workloads, and clean up after deleted pods."""


main.add_command(node)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA"})
@cli.kubeconfig_option
@cli.quota_configmap_option
@cli.quota_key_option
@cli.option(
    "--system-namespace",
    default="vcuda-quota",
    help="Namespace of the Lease, the webhook's Service and the extender's objects.",
)
@cli.ledger_namespace_option
@cli.node_namespace_option
@cli.model_label_option
@cli.pool_label_option
@cli.option(
    "--identity", default=None, help="Name of this replica in the Lease.  [default: host name and a random part]"
)
@cli.option("--lease-seconds", default=15, type=click.IntRange(5, 600), help="Duration of the Lease in seconds.")
@cli.storable_option
@cli.option(
    "--resync-seconds",
    default=int(charge_ages.RecountTiming().resync_seconds),
    type=click.IntRange(1),
    help="Seconds between two resyncs, which recount all ledgers; at least twice --storable-seconds.",
)
@cli.max_terminating_option
@cli.option(
    "--allocation-timeout",
    default=300,
    type=click.IntRange(1, 86400),
    help="Seconds after which an unused allocation of a vendor's scheduler, or its lock on a node, is stale.",
)
@cli.option(
    "--dry-run",
    is_flag=True,
    help="Only log which stale allocations and locks would be removed. Everything else still runs.",
)
@cli.option(
    "--discover",
    is_flag=True,
    help="Label nodes with the GPU model that their device plugin, DRA driver or GPU feature discovery reports.",
)
@cli.option(
    "--evict-violations",
    is_flag=True,
    help="Evict the newest pods beyond an enforced quota. By default they are only reported.",
)
@cli.option(
    "--violations-period",
    default=60,
    type=click.IntRange(1, 86400),
    help="Seconds for which a pod must be beyond its quota before it is evicted, and between two attempts.",
)
@cli.status_address_option
@cli.address_option(
    "--ui-address",
    help="Serve the usage page on this address: read-only, over HTTP, without authentication.  [default: not served]",
)
@cli.option(
    "--ui-host",
    "ui_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that browsers may use for the usage page, in addition to localhost and IP addresses; repeatable.",
)
@cli.address_option(
    "--ui-advertise",
    metavar="IP:PORT",
    parse=cli.parse_ip_address,
    help=f"Address to publish in the EndpointSlice of Service {SERVICE} while this replica leads.",
)
@cli.option(
    "--ui-docs-url",
    default="",
    metavar="URL",
    callback=_web_address,
    help="Documentation that the usage page links to.",
)
@cli.option(
    "--ui-grafana-url",
    default="",
    metavar="URL",
    callback=_web_address,
    help="Grafana dashboard that the usage page links to. The link of a namespace sets the variable `namespace`.",
)
@cli.address_option(
    "--extender-address", help="Serve the scheduler extender on this address while leading.  [default: not served]"
)
@cli.option(
    "--extender-cert-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory with tls.crt and tls.key of the extender.",
)
@cli.option(
    "--extender-client-ca",
    type=click.Path(dir_okay=False, path_type=Path),
    help="PEM file of CAs. The extender answers only clients with a certificate that one of them has issued.",
)
@cli.option(
    "--extender-client-name", default="", help="Common name that the client certificate must have.  [default: any]"
)
@cli.address_option(
    "--extender-advertise",
    metavar="IP:PORT",
    parse=cli.parse_ip_address,
    help=f"Address to publish in the EndpointSlice of Service {service.SERVICE} while this replica leads.",
)
@cli.option(
    "--webhook-service",
    default="vcuda-webhook",
    help="The webhook's Service in the system namespace. Its certificate, the registered webhooks and the policies are"
    " checked. If empty, nothing is checked.",
)
@cli.log_level_option
def run(**values: Any) -> None:
    """Run a replica of the controller. The replica that holds the Lease is the leader; only the leader acts.

    The leader recounts the ledger of each limited namespace from the stored pods, and releases charges of deleted pods.
    It sets the label quota.vcuda.io/enforced to "false" on namespaces without a limit, and publishes ConfigMap
    gpu-quota-usage in the others. It makes workloads that were rejected for quota retry when quota is free.

    The leader also removes stale data of vendors' schedulers: HAMi's locks on nodes, and the allocation annotations of
    pods that were never bound, are bound to another node or have ended. It writes an Event on the object for each
    removal. A running pod on the node of its allocation is never changed.

    With --discover the leader writes the model label of nodes that have none, and keeps it up to date. The annotation
    quota.vcuda.io/discovered-model records the label. The leader never changes a label that somebody else wrote.

    Events and metrics report pods that the quota would not admit: pods that were created before the quota was enforced
    or while the webhook was down, or pods that exceed a lowered quota. With --evict-violations the leader evicts the
    newest of them where the quota is enforced, one at a time, as PodDisruptionBudgets allow.

    With --extender-address the leader is also a scheduler extender that replaces gpu-admission. It chooses the node and
    the cards of every pod that requests tencent.com/vcuda-core or nvidia.com/vcuda-core, and annotates the pod.

    \b
    Examples:
      vcuda-controller run
          runs in a pod, with the pod's service account
      vcuda-controller run --kubeconfig ~/.kube/config --status-address 127.0.0.1:8080
          runs outside the cluster
      vcuda-controller run --ui-address 127.0.0.1:8088
          serves the usage page to browsers on this machine; a standby's page names the leader
      vcuda-controller run --dry-run --allocation-timeout 600
          logs stale allocations older than ten minutes, and does not remove them
      vcuda-controller run --evict-violations --violations-period 600
          evicts pods that have been beyond their quota for ten minutes
      vcuda-controller run --extender-address 127.0.0.1:10443 --extender-cert-dir certs --extender-client-ca ca.crt
          serves a kube-scheduler whose extender has urlPrefix https://127.0.0.1:10443/scheduler

    Exit status: 0 stopped; 1 the Lease was lost (restart the command), or Kubernetes is too old; 2 bad input.
    """
    options = manager.RunOptions(**values)
    _check_resync(options.storable_seconds, options.resync_seconds)
    if options.ui_advertise and not options.ui_address:
        raise click.UsageError("--ui-address is required with --ui-advertise.")
    logs.configure(options.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        listening = None
        if options.extender_address:
            certificate = _mutual_tls(options.extender_cert_dir, options.extender_client_ca)
            where, advertised = options.extender_address, options.extender_advertise
            listening = service.Listening(where, certificate, advertised, options.extender_client_name)
        # The watches, the loops and the extender run in threads, and each thread needs a connection to the API server.
        check = VersionCheck(structlog.get_logger().warning)
        kube = Kube.connect(options.kubeconfig, pool_size=16, version_check=check, grace=AuthorizerGrace())
    except errors.BadInput as error:
        cli.fail(str(error))
    registry = CollectorRegistry()
    leader = manager.Leader(kube, options, registry, on_fault=_end, listening=listening)
    # A random part makes the replica's name in the Lease unique. Two replicas with one name would both act as leader.
    own_name = options.identity or f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    lease = (options.system_namespace, "vcuda-controller")
    elector = Elector(kube, lease, own_name, timing=LeaseTiming.of(options.lease_seconds), wait=stop.wait)
    metrics.register_leading(registry, lambda: elector.is_leading)
    page = UsagePage(lambda: elector.holder, options.ui_hosts)
    source = LeaderSource(kube, leader, options.ui_docs_url, options.ui_grafana_url)
    contexts = [_serve_page(options.ui_address, page, source, leader)]
    if address := options.ui_advertise:
        contexts.append(lambda: advertising(kube, options.system_namespace, address))
    sys.exit(_lead(elector, leader, options.status_address, registry, contexts))


@main.command("uninstall", context_settings={"auto_envvar_prefix": "VCUDA_UNINSTALL"})
@cli.kubeconfig_option
@cli.ledger_namespace_option
@cli.option(
    "--timeout",
    default=60,
    type=click.IntRange(1, 3600),
    help="Seconds for which a rejected change is tried again. A deleted policy still takes effect for some seconds.",
)
def run_uninstall(*, kubeconfig: Path | None, ledger_namespace: str, timeout: int) -> None:
    """Prepare the deletion of all objects of the system. Afterwards no request is rejected.

    Run this command before `kubectl delete`. With Helm, `helm uninstall` runs it. The command deletes the webhook
    configurations and the bindings of the policies. Then it removes the write permissions of the webhook and of the
    controller, and the data that would stay behind: the finalizers of the ledgers, the usage reports, and the label
    quota.vcuda.io/enforced of namespaces. The quota is kept. To restore the system, apply the manifests again.

    \b
    Examples:
      vcuda-controller uninstall --kubeconfig ~/.kube/config
      kubectl delete -k manifests/base

    Exit status: 0 done; 1 the API server rejected a change or did not answer, run it again; 2 bad input.
    """
    try:
        kube = Kube.connect(kubeconfig, version_check=VersionCheck(lambda message: click.echo(message, err=True)))
        Uninstall(kube, ledger_namespace, click.echo).run(timeout)
    except errors.BadInput as error:
        cli.fail(str(error))
    except errors.VcudaError as error:
        cli.fail(str(error), 1)


def _serve_page(
    address: manager.Address | None, page: UsagePage, source: LeaderSource, leader: manager.Leader
) -> Callable[[], AbstractContextManager[None]]:
    """Serve the usage page if ``address`` is given. In a context of the returned function, it shows data."""
    if address is None:
        return nullcontext
    with cli.listening_for("--ui-address", address):
        server = page.serve(address)
    structlog.get_logger().info("serving the usage page", port=server.port)
    return lambda: page.showing(source.documents(), lambda: leader.synced)


def _lead(
    elector: Elector,
    leader: manager.Leader,
    address: manager.Address,
    registry: CollectorRegistry,
    contexts: Sequence[Callable[[], AbstractContextManager[None]]],
) -> int:
    """Wait for the Lease, act as the leader while this replica holds it, and return the exit status.

    ``contexts``: functions that create context managers. These are active while this replica is the leader.
    """
    with cli.listening_for("--status-address", address):
        # A standby is ready when it has listed all pods. So a rollout ends a leader only when the next leader has them.
        server = httpd.serve_status(
            address,
            registry,
            healthy=leader.trouble,
            ready=lambda: None if leader.ready else "some watches still wait for their first list",
        )
    structlog.get_logger().info("serving status", port=server.port)
    leader.watch(lambda: elector.silence > manager.SILENCE_SECONDS)
    if not elector.acquire():
        leader.stop()
        return 0
    leader.lead()
    with ExitStack() as stack:
        for create in contexts:
            stack.enter_context(create())
        # When the Lease is lost, another replica may lead. So end this process immediately, even during a write.
        if not elector.hold():
            _end()
    leader.stop()
    elector.release()  # The Lease is released only after this replica's last write, so the next leader writes alone.
    return 0


def _mutual_tls(certificate: Path | None, client_ca: Path | None) -> tls.ServingCertificate:
    """Load the extender's certificate, and the CA of its clients. Raises BadInput if one of them cannot be read."""
    if certificate is None:
        raise click.UsageError("--extender-cert-dir is required with --extender-address, which serves TLS.")
    if client_ca is None:
        raise click.UsageError(
            "--extender-client-ca is required with --extender-address, which answers only kube-scheduler."
        )
    return tls.ServingCertificate(certificate, client_ca, client_required=True)


def _check_resync(storable: int, resync: int) -> None:
    # After one resync period, the recounter may forget the age of a pending charge. So the charge must expire earlier.
    if resync < 2 * storable:
        message = f"must be at least twice --storable-seconds ({storable}); got {resync}."
        raise click.BadParameter(message, param_hint="--resync-seconds")


def _end() -> None:
    """Exit immediately, without cleanup. After the Lease was lost or a loop has failed, no thread may continue."""
    os._exit(LEADERSHIP_LOST)
