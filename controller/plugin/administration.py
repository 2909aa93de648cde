"""The commands of ``kubectl gpuquota`` for administrators, which need the packages of the extra `server`."""

import click

from controller.plugin.output import Target, output_option, show, warn
from vcuda import cli, programs
from vcuda.cli import FAILED

SYSTEM_NAMESPACE = "vcuda-quota"
"""The default namespace of the webhook and the controller."""


@click.command()
@cli.quota_configmap_option
@cli.quota_key_option
@cli.model_label_option
@output_option
@click.pass_obj
def nodes(
    target: Target, *, quota_configmap: tuple[str, str], quota_key: str, model_label: str, output: str | None
) -> None:
    """Show the GPU nodes with their cards, and for each GPU model the promised and the present cards.

    SOURCE is the source of the model: `label` if an operator wrote the model label, otherwise the source from which the
    controller writes the label. SCHEME lists the device plugins and DRA drivers that serve the node. If no source
    reports a figure, `?` is shown. TAKES PODS is `no` for a node that is cordoned or not ready.

    The second table has a row for each model. PROMISED is the sum of all limits, with the grants that apply now.
    PRESENT is the number of cards of the nodes, and TAKING PODS is the part of it on nodes that are ready and not
    cordoned. CHARGED is the sum of all usage reports. FREE is the part of TAKING PODS that no pod and no claim uses.
    MIG slices count as the parts of a card that they are charged. If the quota ConfigMap is malformed, `?` is shown for
    PROMISED, CHARGED and FREE.

    Warnings are printed on standard error: doubts about the model of a node, models of the quota that no node has, and
    models of which the quotas promise more cards than are present.

    This command needs the packages of the extra `server`: `pip install vcuda-quota[server]`.

    You need permission to list nodes, pods, ResourceClaims, namespaces and ConfigMaps in all namespaces.

    \b
    Examples:
      kubectl gpuquota nodes
      kubectl gpuquota nodes -o json

    Exit status: 0 success, 1 the cluster did not answer or a permission is missing, 2 bad input.
    """
    shown, reader = output or target.output, programs.load("controller.plugin.nodes", "kubectl gpuquota nodes")
    place = (*quota_configmap, quota_key)
    found = reader.read_nodes(reader.connect_to_cluster(target.kubeconfig, target.context), model_label, place)
    if shown in ("json", "yaml"):
        show(found, shown)
        return
    heading = ("NODE", "MODELS", "CARDS", "MEMORY MiB", "SOURCE", "SCHEME", "FREE", "TAKES PODS")
    show(found.nodes, shown, heading, *map(reader.node_row, found.nodes))
    if found.models:
        click.echo()
        names = ("MODEL", "PROMISED", "PRESENT", "TAKING PODS", "CHARGED", "FREE")
        show(found.models, shown, names, *map(reader.model_row, found.models))
    for warning in (*(f"{each.node}: {doubt}" for each in found.nodes for doubt in each.doubts), *found.warnings):
        warn(warning)


@click.command()
@cli.quota_configmap_option
@cli.quota_key_option
@cli.model_label_option
@click.option("--system-namespace", default=SYSTEM_NAMESPACE, help="Namespace of the webhook and the controller.")
@cli.ledger_namespace_option
@cli.node_namespace_option
@output_option
@click.pass_obj
def doctor(
    target: Target, /, *, quota_configmap: tuple[str, str], quota_key: str, output: str | None, **names: str
) -> None:
    """Check the whole installation, and print for each fault what to do.

    The checks: the registered webhooks and policies, and whether the API server calls and applies them; each replica of
    the webhook, at its own address; the controller and its leader; the rollout of both, and of the scheduler; the
    ServiceAccounts and their rights; images that differ; all certificates and the CronJobs that renew them; the quota
    in force, and when it was last changed; the labels of namespaces; models without nodes; nodes without a model;
    closed and damaged ledgers. All requests go through the API server. The only writes are dry runs and
    SubjectAccessReviews, which store nothing.

    A check is `ok`, `wrong`, or `unknown` if something cannot be read, for example because a permission is missing.

    This command needs the packages of the extra `server`: `pip install vcuda-quota[server]`. It needs the permissions
    of a cluster administrator.

    \b
    Examples:
      kubectl gpuquota doctor
      kubectl gpuquota doctor -o json

    Exit status: 0 every check is ok, 1 something is wrong or unknown, or the cluster did not answer, 2 bad input.
    """
    checks = programs.load("controller.plugin.doctor", "kubectl gpuquota doctor")
    found = [*checks.examine(target.kubeconfig, target.context, (*quota_configmap, quota_key), names)]
    show(found, output or target.output, ("CHECK", "STATE", "FINDING"), *map(checks.finding_row, found))
    raise SystemExit(FAILED if any(each.state != checks.OK for each in found) else 0)
