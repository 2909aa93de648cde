"""The command ``vcuda-certs``."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from certs import cluster, options, plan, report, rotation
from certs.steps import OVERLAP, RETENTION, Done, End, RotationPolicy, Step, StepRefused, Wait
from vcuda import cli, errors, tls, x509

NEEDS_A_PERSON = 1

_LONG = timedelta(days=36500)
_OUTPUT = cli.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")


@click.group(context_settings=cli.HELP)
@click.version_option(package_name="vcuda-quota", message="%(prog)s %(version)s")
def main() -> None:
    """Certificates of the vcuda quota webhook.

    The API server calls a webhook over TLS only, and trusts it by the caBundle in the webhook's configuration.
    """


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@cli.option(
    "--dir",
    "directory",
    envvar="VCUDA_CERTS_DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; made if missing.",
)
@options.value_option("--dns", "NAME", x509.parse_dns_name, "A DNS name; repeatable.", multiple=True)
@options.value_option("--ip", "ADDRESS", x509.parse_address, "An IP address; repeatable.", multiple=True)
@options.value_option(
    "--service", "NAME", x509.parse_label, "A Service: adds NAME, NAME.NS, NAME.NS.svc and NAME.NS.svc.cluster.local."
)
@options.value_option("--namespace", "NS", x509.parse_label, "The namespace of --service.")
@cli.option(
    "--days",
    type=click.IntRange(1, x509.AUTHORITY_LIFE.days),
    default=x509.LEAF_LIFE.days,
    help=f"Life of the serving certificate; its CA lives {x509.AUTHORITY_LIFE.days} days.",
)
@cli.option("--ca-key", is_flag=True, help="Write ca.key too; without it the key of the CA is thrown away.")
@cli.option("--force", is_flag=True, help="Replace the files that are there.")
@_OUTPUT
def issue(*, directory: Path, days: int, ca_key: bool, force: bool, output: str, **named: Any) -> None:
    """Make a new CA and a serving certificate, and write them to files.

    For development, and for `vcuda-webhook serve --cert-dir DIR`. Writes ca.crt, tls.crt and tls.key (readable by
    its owner alone). A server that is running picks new files up by itself. Without --dns, --ip and --service the
    certificate is for localhost, 127.0.0.1 and ::1. In environment variables, separate several values by spaces.

    \b
    Examples:
      vcuda-certs issue --dir certs
          to run the webhook on this machine
      vcuda-certs issue --dir certs --service vcuda-webhook --namespace vcuda-system
          to run it behind a Service
      vcuda-certs issue --dir certs --dns gpu.example.com --ip 10.0.0.7 --days 30 --force
          to replace them with shorter-lived ones for these names
      base64 -w0 certs/ca.crt
          the caBundle for the webhook's configuration

    Exit status: 0 written, 2 bad input or files in the way.
    """
    names = _chosen_names(**named)
    if (present := tls.present_files(directory)) and not force:
        raise click.UsageError(f"{directory} already holds {', '.join(present)}: --force replaces them.")
    now = datetime.now(UTC)
    authority = x509.make_authority(now)
    leaf = x509.make_leaf(authority, names, now, timedelta(days=days))
    files = tls.serving_files(authority, leaf) + (tls.signing_files(authority) if ca_key else ())
    try:
        tls.write_files(directory, files)
    except OSError as error:
        raise click.UsageError(f"cannot write to {directory}: {error.strerror or error}.") from error
    render = {"table": _files_table, "json": _files_document}[output]
    click.echo(render(directory, names, files))


def _chosen_names(
    dns: tuple[str, ...], ip: tuple[x509.Address, ...], service: str | None, namespace: str | None
) -> x509.Names:
    """Every name asked for, the Service's first; those for development when none is."""
    if (service is None) != (namespace is None):
        raise click.UsageError("--service and --namespace are given together or not at all.")
    named = x509.service_names(service, namespace) if service and namespace else x509.Names()
    return named + x509.Names(dns, ip) or x509.DEVELOPMENT


def _files_table(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    rows = [("FILE", "HOLDS", "MODE", "EXPIRES")]
    for file in files:
        end = f"{file.expires:%Y-%m-%d %H:%M UTC}" if file.expires else "-"
        rows.append((str(directory / file.name), file.holds, f"{file.mode:04o}", end))
    return "\n".join([*cli.aligned(rows), "", f"Valid for {names}"])


def _files_document(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    # The same as JSON; times as RFC 3339 in UTC, null for a key.
    document = {
        "directory": str(directory),
        "dns": names.dns,
        "ip": [str(address) for address in names.addresses],
        "files": [
            {
                "path": str(directory / file.name),
                "holds": file.holds,
                "mode": f"{file.mode:04o}",
                "expires": file.expires and f"{file.expires:%Y-%m-%dT%H:%M:%SZ}",
            }
            for file in files
        ],
    }
    return json.dumps(document, indent=2)


@dataclass(frozen=True, slots=True)
class StepLog:
    """What a run has to say, step by step: at once for people, at the end for scripts."""

    say: Callable[[str], None]
    steps: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, decision: Step | Wait) -> None:
        """Take note of one step or wait."""
        told = {"step": type(decision).__name__, **_described(decision)}
        self.steps.append(told)
        self.say(" ".join(told.values()))


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.cluster_options
@options.span_option("--ca-life", x509.AUTHORITY_LIFE, options.parse_life, "Life of a new CA.")
@options.span_option("--leaf-life", x509.LEAF_LIFE, options.parse_life, "Life of a new leaf.")
@options.span_option(
    "--overlap",
    OVERLAP,
    options.parse_span,
    "How long every caBundle has a new CA before a leaf of it is served; the API servers follow meanwhile.",
)
@options.span_option(
    "--retention",
    RETENTION,
    options.parse_span,
    "How long the old CA stays in the caBundles after every endpoint serves the new leaf.",
)
@options.value_option(
    "--issued-before",
    "TIME",
    options.parse_past,
    "Replace what was issued before this time, such as 2026-01-31T12:00:00Z: for a key that has leaked.",
)
@options.span_option(
    "--timeout", timedelta(minutes=5), options.parse_span, "How long to wait in all; then another run goes on."
)
@cli.option("--dry-run", is_flag=True, help="Print the steps that it would take, and change nothing.")
@_OUTPUT
def rotate(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Make, renew and replace the webhook's certificates, so that not one call fails.

    Run it daily: it does what is due, and nothing where nothing is. A certificate is replaced when a third of its life
    is left. A new CA is first added to every caBundle; after --overlap a leaf of its own goes into the serving Secret;
    once every ready endpoint has been dialled and shows it, and --retention is over, the old CA is taken out. A leaf
    alone is renewed by the same CA. A run that is killed, or whose --timeout is over, is carried on by the next one;
    two at once do no harm. What is damaged is mended: a Secret that is gone or garbage, a caBundle that was emptied.
    SPAN is a number and one of s, m, h and d, such as 90d.

    \b
    Examples:
      vcuda-certs rotate
          what the CronJob runs
      vcuda-certs rotate --dry-run
          what it would do, to the end
      vcuda-certs rotate --issued-before "$(date -u +%FT%TZ)" --overlap 1m --retention 5m --timeout 20m
          replace the CA and the leaf now, in one run

    Exit status: 0 done, or a later run has to go on; 1 a person is needed, the API server did not answer, or
    Kubernetes is too old; 2 bad input.
    """
    policy = options.policy_of(where)
    log = StepLog(click.echo if output == "table" else lambda _: None)
    with_faults(lambda: _finish(_rotate(options.store_of(where), policy, timeout, log, dry_run=dry_run), log, output))


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.cluster_options
@_OUTPUT
def status(*, output: str, **where: Any) -> None:
    """Show every certificate, where it is, when it expires, and whether the webhooks trust what is served.

    \b
    Examples:
      vcuda-certs status
      vcuda-certs status -o json | jq '.certificates[] | select(.daysLeft < 30)'

    Exit status: 0 all is well; 1 something needs a person, the API server did not answer, or Kubernetes is too old;
    2 bad input.
    """

    def show() -> int:
        store = options.store_of(where)
        now = rotation.SystemClock().now()
        again = f"kubectl -n {store.refs.namespace} create job --from=cronjob/vcuda-certs vcuda-certs-now"
        state = store.read(rotation.SystemClock().now)
        found = report.report_on(state, store.refs, now, options.policy_of(where), again)
        click.echo({"table": report.table, "json": report.document}[output](found))
        return NEEDS_A_PERSON if found.problems else 0

    with_faults(show)


def with_faults(run: Callable[[], int]) -> None:
    """End the process with the status that ``run`` returns, or with that of what went wrong."""
    try:
        sys.exit(run())
    except errors.VcudaError as error:
        cli.fail(rotation.explained(error), cli.BAD_INPUT if isinstance(error, errors.BadInput) else NEEDS_A_PERSON)


def _rotate(
    store: cluster.ClusterStore, policy: RotationPolicy, timeout: timedelta, log: StepLog, *, dry_run: bool
) -> End:
    clock = rotation.SystemClock()
    if not dry_run:
        return rotation.Rotation(store, policy, timeout, clock, log).run()
    copy = rotation.DryRunStore(store.read(clock.now), clock.now())
    return rotation.Rotation(copy, policy, _LONG, copy, log, longest_sleep=_LONG.total_seconds()).run()


def _finish(outcome: End, log: StepLog, output: str) -> int:
    problems = outcome.problems if isinstance(outcome, StepRefused) else ()
    if output == "json":
        name = "Refused" if problems else type(outcome).__name__
        document = {"steps": log.steps, "outcome": name, **_described(outcome), "problems": [*map(asdict, problems)]}
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(_ending(outcome))
    return NEEDS_A_PERSON if problems else 0


def _ending(outcome: End) -> str:
    match outcome:
        case Done():
            until = outcome.until and plan.shown(outcome.until)
            return f"Done: nothing is due until {until}" if until else "Nothing here is ours"
        case StepRefused():
            return "\n".join(f"Needs a person: {problem}" for problem in outcome.problems)
        case Wait():
            due = f"The next step is due at {plan.shown(outcome.until)}. " if outcome.until else ""
            return f"Not yet: {outcome.reason}. {due}Run it again then; the CronJob does."


def _described(decision: Step | End) -> dict[str, str]:
    fields = {name: getattr(decision, name, None) for name in ("configuration", "reason", "until")}
    texts = {name: plan.shown(value) if isinstance(value, datetime) else value for name, value in fields.items()}
    return {name: text for name, text in texts.items() if text}
