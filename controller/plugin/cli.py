"""The kubectl plugin ``kubectl gpuquota``: shows quota and usage, and explains whether a manifest would be admitted."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from controller.plugin.administration import doctor, nodes
from controller.plugin.explain import ExplainedObject, ask_about
from controller.plugin.kubectl import Kubectl
from controller.plugin.output import OUTPUTS, WIDE, Target, output_option, show, warn
from controller.plugin.published import EVERY_REPORT, SpoiltReport, published_of, read_report
from controller.plugin.rejections import read_rejections
from controller.plugin.usage_table import by_team, group_rows, holder_rows, total_rows, total_warnings
from controller.plugin.why import explain_why, parse_object, why_lines
from vcuda import __version__, cli, errors
from vcuda.cli import FAILED
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.rejections import reports_shortage
from vcuda.workloads import NO_PODS, Unread, Workload, check_shape, workloads_in

RESERVED = 8
"""The index of column RESERVED in the usage table. Columns RESERVED and GRANTED are left out if they are empty."""

WATCH_SECONDS = 2.0
"""With the flag ``--watch``, the number of seconds between two reads of the usage reports."""


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

    If the namespace is in a team, more rows show the usage and the limits of the team. The usage of other namespaces is
    one number. The figures of a team are a few seconds old.

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
      kubectl gpuquota rejections
          lists the workloads that were rejected, and why
      kubectl gpuquota why deployment/train
          shows why a workload gets no pods, and how much quota it needs
      kubectl gpuquota nodes
          lists the GPU nodes with their models and free cards, and what the quotas promise of each model
      kubectl gpuquota doctor
          checks the whole installation, and says what to do about each fault

    Exit status: 0 success, 1 the cluster did not answer or the namespace has no quota, 2 bad input.
    """
    context.obj = target = Target(kubeconfig, context_name, namespace, output)
    if context.invoked_subcommand is None:
        api = target.connect()

        def look() -> list[NamespaceUse]:
            if all_namespaces:
                return list(_all(api))
            if not (found := list(published_of(api, home := target.namespace()))):
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
    rows = [*(row for group in by_team(uses) for row in group_rows(group)), *total_rows(uses)]
    # Leave out the last two columns, RESERVED and GRANTED, if they are empty, as they normally are.
    shown = [at for at in range(len(heading)) if at < RESERVED or any(row[at] not in ("", "0") for row in rows)]
    show(uses, output, *(tuple(row[at] for at in shown) for row in (heading, *rows)))
    if output == WIDE:
        click.echo()
        holders = (row for use in uses for row in holder_rows(use))
        show(uses, output, ("NAMESPACE", "MODEL", "HELD BY", "NAME", "CARDS", "MEMORY MiB"), *holders)
    if output in ("table", WIDE):
        if not uses:
            warn("no namespace has published usage: see kubectl gpuquota doctor")
        missing = [f"quotas are not in effect: {use.unregistered}" for use in uses if use.unregistered]
        own = (text for use in uses for text in (*use.warnings, use.unpinned_warning))
        for text in filter(None, dict.fromkeys((*missing, *total_warnings(uses), *own))):
            warn(text)


@main.command()
@click.option("-n", "--namespace", help="Namespace. Also allowed before the command.")
@click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
@output_option
@click.pass_obj
def rejections(target: Target, *, namespace: str | None, all_namespaces: bool, output: str | None) -> None:
    """Show the workloads whose pods or ResourceClaims were rejected: how often, when last, and the newest reason.

    The rejections are read from Events, which the API server keeps for an hour. If a user created a pod directly,
    without a workload, there is no Event. Only that user saw the rejection.

    \b
    Examples:
      kubectl gpuquota rejections
      kubectl gpuquota rejections -n team-a -o json
      kubectl gpuquota rejections -A

    Exit status: 0 success, even if nothing was rejected, 1 the cluster did not answer, 2 bad input.
    """
    found = read_rejections(target.connect(), None if all_namespaces else target.namespace(namespace))
    heading = ("NAMESPACE", "WORKLOAD", "TIMES", "LAST", "REASON")
    rows = ((each.namespace, f"{each.kind}/{each.name}", str(each.count), each.at, each.message) for each in found)
    show(found, output or target.output, heading, *rows)


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
@output_option
@click.pass_obj
def explain(target: Target, *, filenames: tuple[str, ...], namespace: str | None, output: str | None) -> None:
    """Show whether the objects of a manifest would be admitted now. The command uses dry runs, which create nothing.

    The manifest may contain every kind that has pod templates. The command tries one pod of each template, and the
    claims that Kubernetes would create for this pod. Built-in kinds without pods, such as Service, are skipped. A
    custom resource without a pod template is shown as `not asked`. If a pod or claim of the manifest exists, the
    decision is about a second one like it, and a warning says so. Warnings are printed on standard error.

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
            for use in published_of(api, short):
                if use.unstored_warning:
                    warn(use.unstored_warning)
    if not verdicts:
        click.echo(NO_PODS, err=True)
    raise SystemExit(FAILED if any(verdict.decision != "admitted" for verdict in verdicts) else 0)


@main.command()
@click.argument("named", metavar="KIND/NAME")
@click.option("-n", "--namespace", help="Namespace. Also allowed before the command.")
@output_option
@click.pass_obj
def why(target: Target, *, named: str, namespace: str | None, output: str | None) -> None:
    """Show why a workload gets no pods: recent rejections, pending pods, and whether a pod would be admitted now.

    The rejections are read from Events, which the API server keeps for an hour. If pods of the workload exist and are
    Pending, their states are shown first, with the states of their ResourceClaims. The command then tries one pod of
    the workload in a server-side dry run, which creates nothing. If quota is missing, the command shows how much must
    become free, and which pods use it. If all pods of the workload exist, the command says so, and tries none. If you
    name a pod that exists, the pod was admitted, and its state and claims are shown. A claim that Kubernetes has not
    created yet is tried in a dry run.

    \b
    Examples:
      kubectl gpuquota why deployment/train
      kubectl gpuquota why job/eval -n team-a -o json
      kubectl gpuquota why pod/train-0

    Exit status: 0 a pod would be admitted now, 1 it would not, or the cluster did not answer, 2 bad input.
    """
    kind, name = parse_object(named)
    api, home = target.connect(), target.namespace(namespace)
    found = explain_why(api, kind, name, home, lambda: next(published_of(api, home), None))
    if (output or target.output) in ("json", "yaml"):
        show(found, output or target.output)
    else:
        click.echo("\n".join(map(cli.escaped, why_lines(found))))
    raise SystemExit(0 if found.is_admitted else FAILED)


def _show_verdicts(verdicts: list[ExplainedObject], output: str) -> None:
    heading = ("OBJECT", "NAMESPACE", "DECISION", "MODEL", "REASON")
    show(verdicts, output, heading, *((v.object, v.namespace, v.decision, v.model, v.reason) for v in verdicts))
    for verdict in verdicts if output in ("table", WIDE) else ():
        for warning in verdict.warnings:
            warn(f"{verdict.object}: {warning}")


def _all(api: Kubectl) -> Iterator[NamespaceUse]:
    for config_map in api.list_objects("/api/v1/configmaps", EVERY_REPORT):
        try:
            yield read_report(config_map)
        except SpoiltReport as error:  # One invalid usage report must not hide the reports of other namespaces.
            warn(str(error))


main.add_command(nodes)
main.add_command(doctor)
