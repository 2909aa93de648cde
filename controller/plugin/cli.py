"""The kubectl plugin ``kubectl gpuquota``: shows quota and usage, and explains whether a manifest would be admitted."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import yaml

from controller.plugin.explain import ExplainedObject, ask_about
from controller.plugin.kubectl import Kubectl, read_json, segment
from controller.plugin.refused import read_refusals
from controller.plugin.usage_table import holder_rows, total_rows, use_rows
from controller.plugin.why import explain_why, parse_object, why_lines
from vcuda import __version__, cli, errors, programs
from vcuda.cli import FAILED
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.terms import NAMESPACE_RULE, USAGE_KEY, USAGE_LABELS, USAGE_NAME, is_namespace_name, reports_shortage
from vcuda.workloads import NO_PODS, Unread, Workload, check_shape, workloads_in

RESERVED = 8
"""The index of column RESERVED in the usage table. Columns RESERVED and GRANTED are left out if they are empty."""

WATCH_SECONDS = 2.0
"""With the flag ``--watch``, the number of seconds between two reads of the usage reports."""

WIDE = "wide"
OUTPUTS = click.Choice(["table", WIDE, "json", "yaml"])


class SpoiltReport(errors.VcudaError):
    """The usage report of a namespace is invalid, or describes another namespace, because somebody has edited it."""


@dataclass(frozen=True, slots=True)
class Target:
    """The flags before the subcommand of ``kubectl gpuquota``. ``named``: the value of --namespace, or None."""

    kubeconfig: Path | None
    context: str | None
    named: str | None
    output: str

    def namespace(self, named: str | None = None) -> str:
        """Return the namespace that the command is about. If the name is invalid, exit with status 2.

        The name is ``named`` if given, else the flag --namespace, else the namespace in the kubeconfig's context.
        """
        namespace = named or self.named or self.connect().namespace()
        if not is_namespace_name(namespace):
            cli.fail(f"{namespace!r} is not a valid namespace: {NAMESPACE_RULE}")
        return namespace

    def connect(self) -> Kubectl:
        """Return an API client that runs kubectl. Raises BadInput if kubectl is not installed."""
        return Kubectl.find(self.kubeconfig, self.context)


class PluginGroup(click.Group):
    """The command group. A VcudaError ends the program with its message: with status 2 for BadInput, otherwise 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except errors.VcudaError as error:
            cli.fail(str(error), cli.BAD_INPUT if isinstance(error, errors.BadInput) else FAILED)


@click.group(cls=PluginGroup, invoke_without_command=True, context_settings=cli.HELP)
@click.version_option(__version__, prog_name="kubectl gpuquota", message="%(prog)s %(version)s")
@click.option("-n", "--namespace", help="Namespace.  [default: the namespace of the context]")
@click.option("-A", "--all-namespaces", is_flag=True, help="Every limited namespace.")
@click.option("-w", "--watch", is_flag=True, help="Show the figures again whenever they change, until Ctrl-C.")
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Path of the kubeconfig.  [default: the kubeconfig that kubectl uses]",
)
@click.option("--context", "context_name", help="Context of the kubeconfig.")
@click.option(
    "-o",
    "--output",
    type=OUTPUTS,
    default="table",
    show_default=True,
    help="Output format; wide also lists the pods and ResourceClaims that hold cards.",
)
@click.pass_context
def main(
    context: click.Context,
    *,
    namespace: str | None,
    all_namespaces: bool,
    watch: bool,
    kubeconfig: Path | None,
    context_name: str | None,
    output: str,
) -> None:
    """Show a namespace's GPU quota: used, limit and pending cards of each model.

    While many pods are created, the webhook may reserve some cards in advance, to admit the next pods faster. RESERVED
    shows these cards, which USED does not include. Unused reserved cards are released within seconds. GRANTED shows
    the temporary parts of a limit, and when each part ends.

    FREE is the unused part of a limit, never less than 0. With -A, the rows `total` add up each model over all
    namespaces. Limits may add up to more cards than the nodes have, and so may FREE.

    \b
    Examples:
      kubectl gpuquota
      kubectl gpuquota --watch
      kubectl gpuquota -n team-a -o json
      kubectl gpuquota -n team-a -o wide
          also lists the pods and ResourceClaims that hold cards, largest first
      kubectl gpuquota -A
      kubectl gpuquota explain -f pod.yaml
          shows whether these pods and claims would be admitted now, and why
      kubectl gpuquota refusals
          lists the workloads that were rejected, and why
      kubectl gpuquota why deployment/train
          shows why a workload gets no pods, and how much quota it needs
      kubectl gpuquota nodes
          lists the GPU nodes with their models and free cards

    Exit status: 0 success, 1 the cluster did not answer or the namespace has no quota, 2 bad input.
    """
    context.obj = target = Target(kubeconfig, context_name, namespace, output)
    if context.invoked_subcommand is None:
        api = target.connect()

        def look() -> list[NamespaceUse]:
            if all_namespaces:
                return list(_all(api))
            if not (found := list(_published(api, home := target.namespace()))):
                cli.fail(f"namespace {home} has no GPU quota, or its usage has not been published yet", FAILED)
            return found

        for number, uses in enumerate(_looks(look) if watch else [look()]):
            if number:
                click.echo()
            _show_uses(uses, output)


def _looks(look: Callable[[], list[NamespaceUse]]) -> Iterator[list[NamespaceUse]]:
    """Yield all usage reports at the start, and again after each change, until the user presses Ctrl-C."""
    shown: list[NamespaceUse] | None = None
    try:
        while True:
            if (found := look()) != shown:
                yield found
                shown = found
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return


def _show_uses(uses: list[NamespaceUse], output: str) -> None:
    heading = ("NAMESPACE", "MODEL", "USED", "FREE", "LIMIT", "", "PENDING", "MEMORY MiB", "RESERVED", "GRANTED")
    rows = [*(row for use in uses for row in use_rows(use)), *total_rows(uses)]
    # Leave out the last two columns, RESERVED and GRANTED, if they are empty, as they normally are.
    shown = [at for at in range(len(heading)) if at < RESERVED or any(row[at] not in ("", "0") for row in rows)]
    _show(uses, output, *(tuple(row[at] for at in shown) for row in (heading, *rows)))
    if output == WIDE:
        click.echo()
        holders = (row for use in uses for row in holder_rows(use))
        _show(uses, output, ("NAMESPACE", "MODEL", "HELD BY", "NAME", "CARDS", "MEMORY MiB"), *holders)
    if output in ("table", WIDE):
        missing = [f"quotas are not in effect: {use.unregistered}" for use in uses if use.unregistered]
        for text in dict.fromkeys((*missing, *(text for use in uses for text in use.warnings))):
            _warn(text)


@main.command()
@click.option("-n", "--namespace", help="Namespace. Also allowed before the command.")
@click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
@click.option("-o", "--output", type=OUTPUTS, help="Output format. Also allowed before the command.  [default: table]")
@click.pass_obj
def refusals(target: Target, *, namespace: str | None, all_namespaces: bool, output: str | None) -> None:
    """Show the workloads whose pods or ResourceClaims were rejected: how often, when last, and the newest reason.

    The rejections are read from Events, which the API server keeps for an hour. If a user created a pod directly,
    without a workload, there is no Event. Only that user saw the rejection.

    \b
    Examples:
      kubectl gpuquota refusals
      kubectl gpuquota refusals -n team-a -o json
      kubectl gpuquota refusals -A

    Exit status: 0 success, even if nothing was rejected, 1 the cluster did not answer, 2 bad input.
    """
    found = read_refusals(target.connect(), None if all_namespaces else target.namespace(namespace))
    heading = ("NAMESPACE", "WORKLOAD", "TIMES", "LAST", "REASON")
    rows = ((each.namespace, f"{each.kind}/{each.name}", str(each.count), each.at, each.message) for each in found)
    _show(found, output or target.output, heading, *rows)


@main.command()
@cli.quota_configmap_option
@cli.quota_key_option
@cli.model_label_option
@click.option("-o", "--output", type=OUTPUTS, help="Output format. Also allowed before the command.  [default: table]")
@click.pass_obj
def nodes(
    target: Target, *, quota_configmap: tuple[str, str], quota_key: str, model_label: str, output: str | None
) -> None:
    """Show the GPU nodes: the models of their cards, the number of cards, the memory of a card, and the free cards.

    SOURCE is the source of the model: `label` if an operator wrote the model label, otherwise the source from which the
    controller writes the label. SCHEME lists the device plugins and DRA drivers that serve the node. If no source
    reports a figure, `?` is shown. TAKES PODS is `no` for a node that is cordoned or not ready. Doubts about a model
    are printed on standard error. A warning about each model of the quota that no node has is printed there too.

    This command needs the packages of the extra `server`: `pip install vcuda-quota[server]`.

    You need permission to list nodes, pods and ResourceClaims in all namespaces, and to read the quota ConfigMap.

    \b
    Examples:
      kubectl gpuquota nodes
      kubectl gpuquota nodes -o json

    Exit status: 0 success, 1 the cluster did not answer or a permission is missing, 2 bad input.
    """
    shown, reader = output or target.output, programs.load("controller.plugin.nodes", "kubectl gpuquota nodes")
    found = reader.read(target.kubeconfig, target.context, model_label, (*quota_configmap, quota_key))
    heading = ("NODE", "MODELS", "CARDS", "MEMORY MiB", "SOURCE", "SCHEME", "FREE", "TAKES PODS")
    _show(found.nodes, shown, heading, *map(reader.node_row, found.nodes))
    doubts = [f"{each.node}: {doubt}" for each in found.nodes for doubt in each.doubts]
    for warning in (*doubts, *found.warnings) if shown in ("table", WIDE) else ():
        _warn(warning)


@main.command()
@click.option(
    "-f",
    "--filename",
    "filenames",
    required=True,
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Manifest file, or - for standard input; repeatable.",
)
@click.option("-n", "--namespace", help="Namespace. Also allowed before the command.")
@click.option("-o", "--output", type=OUTPUTS, help="Output format. Also allowed before the command.  [default: table]")
@click.pass_obj
def explain(target: Target, *, filenames: tuple[str, ...], namespace: str | None, output: str | None) -> None:
    """Show whether the objects of a manifest would be admitted now. The command uses dry runs, which create nothing.

    The manifest may contain every kind that has pod templates. The command tries one pod of each template, and the
    claims that Kubernetes would create for this pod. Built-in kinds without pods, such as Service, are skipped. A
    custom resource without a pod template is shown as `not asked`. Warnings of the cluster are printed on standard
    error.

    If HAMi-DRA's webhook may create a ResourceClaim for a pod, the pod is not tried. That webhook creates the claim
    even in a dry run, and does not delete it.

    \b
    Examples:
      kubectl gpuquota explain -f pod.yaml
      kubectl gpuquota explain -n team-a -f deployment.yaml -o json
      kubectl gpuquota explain -f claim-template.yaml -f pod.yaml

    Exit status: 0 everything would be admitted, 1 something would not, or the cluster did not answer, 2 bad input.
    """
    api = target.connect()
    home = target.namespace(namespace)
    workloads: list[Workload | Unread] = []
    try:
        for filename in filenames:
            with click.open_file(filename, encoding="utf-8") as file:
                workloads += workloads_in(filename, file.read(), home, check_shape)
    except (OSError, UnicodeDecodeError) as error:
        cli.fail(str(error))
    for malformed in (each for each in workloads if isinstance(each, Unread) and each.malformed):
        cli.fail(malformed.reason)
    verdicts = list(ask_about(api, workloads))
    _show_verdicts(verdicts, output or target.output)
    for short in {each.namespace for each in verdicts if reports_shortage(each.reason)}:
        with contextlib.suppress(errors.ApiError, SpoiltReport):
            for use in _published(api, short):
                if use.unstored_warning:
                    _warn(use.unstored_warning)
    if not verdicts:
        click.echo(NO_PODS, err=True)
    raise SystemExit(FAILED if any(verdict.decision != "admitted" for verdict in verdicts) else 0)


@main.command()
@click.argument("named", metavar="KIND/NAME")
@click.option("-n", "--namespace", help="Namespace. Also allowed before the command.")
@click.option("-o", "--output", type=OUTPUTS, help="Output format. Also allowed before the command.  [default: table]")
@click.pass_obj
def why(target: Target, *, named: str, namespace: str | None, output: str | None) -> None:
    """Show why a workload gets no pods: recent rejections, pending pods, and whether a pod would be admitted now.

    The rejections are read from Events, which the API server keeps for an hour. If pods of the workload exist and are
    Pending, their states are shown first. The command then tries one pod of the workload in a server-side dry run,
    which creates nothing. If quota is missing, the command shows how much must become free, and which pods use it. If
    you name a pod that exists, the pod was admitted, and its state is shown.

    \b
    Examples:
      kubectl gpuquota why deployment/train
      kubectl gpuquota why job/eval -n team-a -o json
      kubectl gpuquota why pod/train-0

    Exit status: 0 a pod would be admitted now, 1 it would not, or the cluster did not answer, 2 bad input.
    """
    kind, name = parse_object(named)
    api, home = target.connect(), target.namespace(namespace)
    found = explain_why(api, kind, name, home, lambda: next(_published(api, home), None))
    if (output or target.output) in ("json", "yaml"):
        _show(found, output or target.output)
    else:
        click.echo("\n".join(map(cli.printable, why_lines(found))))
    raise SystemExit(0 if found.is_admitted else FAILED)


def _show_verdicts(verdicts: list[ExplainedObject], output: str) -> None:
    heading = ("OBJECT", "NAMESPACE", "DECISION", "MODEL", "REASON")
    _show(verdicts, output, heading, *((v.object, v.namespace, v.decision, v.model, v.reason) for v in verdicts))
    for verdict in verdicts if output in ("table", WIDE) else ():
        for warning in verdict.warnings:
            _warn(f"{verdict.object}: {warning}")


def _published(api: Kubectl, namespace: str) -> Iterator[NamespaceUse]:
    with contextlib.suppress(errors.NotFound):
        yield _read(read_json(api.get(f"/api/v1/namespaces/{segment(namespace)}/configmaps/{USAGE_NAME}")))


def _all(api: Kubectl) -> Iterator[NamespaceUse]:
    # A policy allows only the controller to write ConfigMaps with this name, so no tenant can forge a usage report.
    labels = ",".join(f"{key}={value}" for key, value in USAGE_LABELS.items())
    own = {"fieldSelector": f"metadata.name={USAGE_NAME}", "labelSelector": labels}
    for config_map in api.list_objects("/api/v1/configmaps", own):
        try:
            yield _read(config_map)
        except SpoiltReport as error:  # One invalid usage report must not hide the reports of other namespaces.
            _warn(str(error))


def _read(config_map: dict[str, Any]) -> NamespaceUse:
    namespace = config_map["metadata"]["namespace"]
    where = f"the usage report in ConfigMap {USAGE_NAME} of namespace {namespace}"
    try:
        use = msgspec.json.decode((config_map.get("data") or {}).get(USAGE_KEY, ""), type=NamespaceUse)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SpoiltReport(f"{where} cannot be read: {error}") from error
    if use.namespace != namespace:
        raise SpoiltReport(f"{where} is the report of another namespace")
    return use


def _warn(text: str) -> None:
    click.echo(f"Warning: {cli.printable(text)}", err=True)


def _show(values: Any, output: str, *table: tuple[str, ...]) -> None:
    plain = [*map(asdict, values)] if isinstance(values, list | tuple) else asdict(values)
    if output == "json":
        click.echo(json.dumps(plain, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(plain, sort_keys=False), nl=False)
    else:
        click.echo("\n".join(cli.aligned([tuple(map(cli.printable, row)) for row in table])))
