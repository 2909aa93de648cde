"""The command ``vcuda-webhook``."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import structlog

from vcuda import __version__, cli, errors, kube, logs, tls, x509
from vcuda.k8s_types import can_be_name
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.patches import PinSettings
from vcuda.requests.resources import WILDCARDS
from vcuda.requests.runtime_devices import GPU_RUNTIME_CLASSES
from vcuda.requests.schemes import SCHEMES
from vcuda.workloads import NO_PODS
from webhook.check import check as offline, files, quota_edit as checked_edit
from webhook.check.standalone import standalone_service
from webhook.review import context
from webhook.server import app, server

_ANY_CHARACTER = dict.fromkeys(map(ord, WILDCARDS), "x")
T = TypeVar("T")

_file = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
_ENVIRONMENT = {"auto_envvar_prefix": "VCUDA"}


def _hint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    scheduler_name = cli.option("--scheduler-name", help="Scheduler for vcuda pods, in place of the default scheduler.")
    scheme_schedulers = cli.option(
        "--scheme-schedulers",
        default="",
        metavar="SCHEME=NAME,...",
        callback=_scheme_schedulers,
        help="Schedulers for the pods of one scheme, for example hami=hami-scheduler. The key gpu_schemes of the quota "
        "ConfigMap takes precedence.",
    )
    runtime_classes = cli.option(
        "--gpu-runtime-classes",
        default=",".join(GPU_RUNTIME_CLASSES),
        metavar="PATTERNS",
        callback=_runtime_classes,
        help="Comma-separated runtime classes that give GPUs; `*` matches any text. A pod that requests no GPU is "
        "rejected if the name or the handler of its class matches. `check` and --standalone compare names only.",
    )
    return cli.model_label_option(cli.pool_label_option(scheduler_name(scheme_schedulers(runtime_classes(command)))))


def _names(_context: click.Context, _option: click.Parameter, text: str) -> frozenset[str]:
    return frozenset(filter(None, map(str.strip, text.split(","))))


def _scheme_schedulers(_context: click.Context, _option: click.Parameter, text: str) -> Mapping[str, str]:
    found = dict(part.partition("=")[::2] for part in map(str.strip, text.split(",")) if part)
    names = [scheme.name for scheme in SCHEMES]
    for scheme, scheduler in found.items():
        if scheme not in names:
            raise click.BadParameter(f"unknown scheme {scheme!r}; supported schemes: {', '.join(names)}.")
        if not can_be_name(scheduler):
            raise click.BadParameter(f"must be {scheme}=NAME with the name of a scheduler; got {scheduler!r}.")
    return found


def _runtime_classes(_context: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    patterns = tuple(filter(None, map(str.strip, text.split(","))))
    for pattern in patterns:
        if not can_be_name(pattern.translate(_ANY_CHARACTER)):
            raise click.BadParameter(
                f"must be comma-separated patterns of names, for example nvidia,kata-*-gpu; got {pattern!r}."
            )
    return patterns


@click.group(context_settings=cli.HELP)
@click.version_option(__version__, message="%(prog)s %(version)s")
def main() -> None:
    """Enforces the GPU quota of each namespace, per GPU model, when pods are created."""


@main.command(context_settings=_ENVIRONMENT)
@cli.address_option("--bind", default="0.0.0.0:8443", help="Address to listen on; port 0 picks a free port.")
@cli.option("--cert-dir", type=click.Path(file_okay=False, path_type=Path), help="Directory of tls.crt and tls.key.")
@cli.option(
    "--client-ca",
    type=_file,
    help="File of the CAs that sign client certificates. A client without a certificate gets only the health checks "
    "and, by default, the metrics.",
)
@cli.option("--client-name", metavar="NAME", help="Common name that a client certificate must have.")
@cli.option(
    "--protect-metrics",
    is_flag=True,
    help="Require a client certificate for /metrics too, and name namespaces in vcuda_rejections_total. The health "
    "checks never need a certificate.",
)
@cli.kubeconfig_option
@cli.quota_configmap_option
@cli.quota_key_option
@cli.option(
    "--system-namespace",
    default="vcuda-quota",
    help="Namespace in which this system is installed. The quota's entry `*` does not apply to it.",
)
@cli.ledger_namespace_option
@cli.node_namespace_option
@cli.storable_option
@cli.max_terminating_option
@_hint_options
@cli.option(
    "--scheduler-users",
    default=",".join(context.SCHEDULER_USERS),
    metavar="NAMES",
    callback=_names,
    help="Comma-separated users whose ResourceClaims are not charged, because a scheduler creates such a claim for a "
    "pod that is charged already. Name all your schedulers, and no other user.",
)
@cli.option(
    "--drain-seconds",
    default=5.0,
    type=cli.FiniteRange(0, 600),
    help="Seconds for which reviews are still answered after SIGTERM, while readiness fails.",
)
@cli.log_level_option
@cli.option("--standalone", is_flag=True, help="Run without a cluster: the quota is in --quota, the ledger in memory.")
@cli.option("--quota", type=_file, help="File of the quota document or of the quota ConfigMap, for --standalone.")
@cli.option("--nodes", type=_file, help="File of nodes, devices and stored objects (see `check`), for --standalone.")
def serve(**values: Any) -> None:
    """Serve the webhook over TLS: /mutate, /validate, /quota, /healthz, /readyz and /metrics.

    On a cluster the webhook watches the quota ConfigMap and the nodes. It keeps one ledger per namespace, in which it
    records the charges. The webhook reloads the certificate in --cert-dir and the file of --client-ca when they change.
    After SIGTERM, readiness fails, and reviews are answered for --drain-seconds. Then the webhook exits without losing
    a request.

    \b
    Examples:
      vcuda-webhook serve --cert-dir /certs
          in a pod, with its service account
      vcuda-webhook serve --cert-dir certs --kubeconfig ~/.kube/config --bind 127.0.0.1:8443
          outside the cluster; `vcuda-certs issue --dir certs` makes the certificates
      vcuda-webhook serve --standalone --quota gpuquota.yaml --bind 127.0.0.1:8443
          without a cluster, with a certificate made for this run

    Exit status: 0 if a signal stopped the webhook; 1 if it cannot listen on the address, or if Kubernetes is too old;
    2 for bad input.
    """
    options = server.ServeOptions(**values)
    logs.configure_batched(options.log_level)
    if options.client_ca is None and (options.client_name or options.protect_metrics):
        raise click.UsageError("--client-name and --protect-metrics need --client-ca FILE.")
    callers = app.Callers(options.client_ca, options.client_name, options.protect_metrics)
    if options.standalone:
        if options.quota is None:
            raise click.UsageError("--standalone needs --quota FILE.")
        given = options.quota, options.nodes, options.pin_settings, options.gpu_runtime_classes, options.scheduler_users
        embedded = _or_exit(lambda: files.read_cluster(*given))
        with nullcontext(options.cert_dir) if options.cert_dir else _self_made() as certificates:
            settings = server.Settings(options.bind, certificates, options.drain_seconds, callers)
            _run(settings, partial(standalone_service, embedded))
        return
    if options.cert_dir is None:
        raise click.UsageError("--cert-dir DIR is needed; `vcuda-certs issue --dir DIR` makes one.")
    failure = server.Failure()
    _or_exit(lambda: kube.Kube.connect(options.kubeconfig).close())  # checks the credentials before the start
    try:
        _run(
            server.Settings(options.bind, options.cert_dir, options.drain_seconds, callers),
            partial(server.cluster_service, options, failure.end),
        )
    finally:
        if failure.happened:
            sys.exit(cli.FAILED)


@main.command(context_settings=_ENVIRONMENT)
@click.argument("manifests", nargs=-1, type=_file, metavar="[MANIFEST.yaml...]")
@cli.option("--quota", required=True, type=_file, help="File of the quota document or of the quota ConfigMap.")
@cli.option("--old", type=_file, help="File of the quota before an edit. The changes to --quota are shown.")
@cli.option("--nodes", type=_file, help="File of nodes, devices and stored objects, as `kubectl get` prints them.")
@cli.option("-n", "--namespace", default="default", help="Namespace of manifests without a namespace.")
@cli.option("--strict", is_flag=True, help="Exit with status 1 if an object is unknown or skipped.")
@_hint_options
@cli.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def check(
    *,
    manifests: tuple[Path, ...],
    quota: Path,
    old: Path | None,
    nodes: Path | None,
    namespace: str,
    strict: bool,
    scheduler_name: str | None,
    scheme_schedulers: Mapping[str, str],
    gpu_runtime_classes: tuple[str, ...],
    pool_label: str,
    model_label: str,
    output: str,
) -> None:
    """Show whether the webhook would admit the pods and ResourceClaims of these manifests, without a cluster.

    The command reads every kind of object that has pod templates. These are the workloads of Kubernetes and for example
    PyTorchJob, RayCluster, JobSet, LeaderWorkerSet, InferenceService, LLMInferenceService, Workflow, Rollout and
    Notebook. Each template is decided once for each replica that the object states, or once if the object states no
    number. A DaemonSet is decided once. The output leaves out Kubernetes objects without pods, such as a Service.

    The objects are decided in the order of the files. Each admitted object uses quota, so later objects have less.
    The claims that Kubernetes makes for a pod from templates are decided after the pod. Objects in kube-system and in
    this system's namespaces are charged but never rejected, because the manifests exempt these namespaces.

    A decision is "unknown" if a ResourceClaimTemplate is missing. It is also "unknown" if the pod selects nodes by
    their labels or names, and --nodes is not given. An object of another kind without a pod template is "skipped". A
    malformed object does not affect the other objects.

    The file of --quota is the ConfigMap with all its keys, or only the document in key gpu_quota. The file of --nodes
    has the nodes, and the ResourceSlices, DeviceClasses and ResourceClaimTemplates on which the charge of a claim
    depends. If that file has Pods and ResourceClaims, these are charged first. Otherwise no running pod is charged.
    Claims are decided as on Kubernetes 1.34 or later. On older versions, which have no claims, the webhook rejects
    pods that name claims.

    With --old, the changes of the quota are shown too, and no manifest is needed. Warnings about the quota are printed
    on standard error. With -o json, the warnings are part of the output.

    \b
    Examples:
      vcuda-webhook check --quota gpuquota.yaml -n team-a deployment.yaml
      kubectl get nodes,resourceslices,deviceclasses,resourceclaimtemplates,resourceclaims,pods -A -o yaml > now.yaml
      vcuda-webhook check --quota gpuquota.yaml --nodes now.yaml claim.yaml
          together with the objects that are stored now
      kustomize build . | vcuda-webhook check --quota gpuquota.yaml --strict -o json -
      vcuda-webhook check --old old.yaml --quota new.yaml

    Exit status: 0 if all objects are admitted; 1 if an object is rejected; 2 for bad input. With --strict, the status
    is also 1 if an object is unknown or skipped.
    """
    if not manifests and old is None:
        raise click.UsageError("MANIFEST.yaml or --old FILE is required")
    now = time.time()
    pin_settings = PinSettings(NodeLabels(model_label, pool_label), scheduler_name, scheme_schedulers)
    cluster = _or_exit(lambda: files.read_cluster(quota, nodes, pin_settings, gpu_runtime_classes)).at(now)
    edit = _or_exit(lambda: checked_edit.read_edit(old, quota, cluster, now, has_nodes=nodes is not None))
    workloads = _or_exit(lambda: offline.read_workloads(list(manifests), namespace))
    rows = offline.check_objects(workloads, cluster)
    if output == "json":
        found = {**edit.as_json(), "objects": [row.as_json() for row in rows]}
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        shown = [edit.table()] if old else []
        shown += [offline.decision_table(rows)] if manifests else []
        click.echo("\n\n".join("\n".join(lines) for lines in shown))
        for warning in edit.warnings:
            click.echo(f"Warning: {warning}", err=True)
    if manifests and not rows:
        click.echo(NO_PODS, err=True)
    sys.exit(offline.exit_status(rows, strict=strict))


def _run(settings: server.Settings, make_service: server.MakeService) -> None:
    log = structlog.get_logger()
    _or_exit(lambda: server.WebhookServer(settings, make_service, lambda url: log.info("listening", url=url))).run()


def _or_exit(read: Callable[[], T]) -> T:
    """Return the result of ``read``. If the input is faulty, print every fault and exit with status 2."""
    try:
        return read()
    except errors.QuotaFault as fault:
        lines = [str(each) for each in fault.faults]
        click.echo("\n".join(["Error: the quota document is malformed:", *(f"  {line}" for line in lines)]), err=True)
    except errors.BadInput as error:
        cli.fail(str(error))
    sys.exit(cli.BAD_INPUT)


@contextmanager
def _self_made() -> Iterator[Path]:
    """Yield a directory with a new certificate for localhost. The directory is deleted when the run ends."""
    now = datetime.now(UTC)
    authority = x509.make_authority(now)
    with tempfile.TemporaryDirectory(prefix="vcuda-webhook-") as scratch:
        directory = Path(scratch)
        tls.write_files(directory, tls.serving_files(authority, x509.make_leaf(authority, x509.DEVELOPMENT, now)))
        structlog.get_logger().info("certificate made for this run", ca=str(directory / "ca.crt"))
        yield directory
