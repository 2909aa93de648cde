"""``vcuda-certs rotate`` and ``vcuda-certs status``: the commands that look at a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

import click

from certs import report
from certs.api import Api, ApiFault, NoCredentials
from certs.cluster import Cluster
from certs.options import cluster_options, format_span, option, parse_life, parse_past, parse_span, parsed
from certs.parsing import Place
from certs.plan import shown
from certs.rotation import Rehearsal, Rotation, SystemClock
from certs.steps import OVERLAP, RETENTION, Commands, Done, Refused, Step, Terms, Wait
from certs.version import VersionCheck
from certs.x509 import AUTHORITY_LIFE, LEAF_LIFE, Address, Names, service_names

NEEDS_A_PERSON = 1
BAD_INPUT = 2

_LONG = timedelta(days=36500)
_output = option("-o", "--output", type=click.Choice(["table", "json"]), default="table")


@dataclass(frozen=True, slots=True)
class Told:
    """What a run has to say, step by step: at once for people, at the end for scripts."""

    say: Callable[[str], None]
    steps: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, decision: Step | Wait) -> None:
        """Take note of one step or wait."""
        self.steps.append({"step": type(decision).__name__, **_described(decision)})
        self.say(" ".join([type(decision).__name__, *(f"{text}" for text in _described(decision).values())]))


@click.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@cluster_options
@option(
    "--ca-life", metavar="SPAN", default=format_span(AUTHORITY_LIFE), type=parsed(parse_life), help="Life of a new CA."
)
@option(
    "--leaf-life", metavar="SPAN", default=format_span(LEAF_LIFE), type=parsed(parse_life), help="Life of a new leaf."
)
@option(
    "--overlap",
    metavar="SPAN",
    default=format_span(OVERLAP),
    type=parsed(parse_span),
    help="How long every caBundle has a new CA before a leaf of it is served; the API servers follow meanwhile.",
)
@option(
    "--retention",
    metavar="SPAN",
    default=format_span(RETENTION),
    type=parsed(parse_span),
    help="How long the old CA stays in the caBundles after every endpoint serves the new leaf.",
)
@option(
    "--issued-before",
    metavar="TIME",
    type=parsed(parse_past),
    help="Replace what was issued before this time, such as 2026-01-31T12:00:00Z: for a key that has leaked.",
)
@option(
    "--timeout",
    default="5m",
    metavar="SPAN",
    type=parsed(parse_span),
    help="How long to wait in all; then another run goes on.",
)
@option("--dry-run", is_flag=True, help="Print the steps that it would take, and change nothing.")
@_output
def rotate(
    *,
    ca_life: timedelta,
    leaf_life: timedelta,
    overlap: timedelta,
    retention: timedelta,
    issued_before: datetime | None,
    timeout: timedelta,
    dry_run: bool,
    output: str,
    **where: Any,
) -> None:
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
    registered = not where["unregistered"]
    terms = Terms(_names(where), ca_life, leaf_life, overlap, retention, issued_before, registered, _commands(where))
    told = Told(click.echo if output == "table" else lambda _: None)
    with_faults(lambda: _finish(_rotate(_cluster(where), terms, timeout, told, dry_run=dry_run), told, output))


@click.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@cluster_options
@_output
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
        cluster = _cluster(where)
        terms = Terms(_names(where), registered=not where["unregistered"], commands=_commands(where))
        now = SystemClock().now()
        found = report.report_on(cluster.read(SystemClock().now), cluster.place, now, terms, _rotate_now(where))
        click.echo({"table": report.table, "json": report.document}[output](found))
        return NEEDS_A_PERSON if found.problems else 0

    with_faults(show)


def with_faults(run: Callable[[], int]) -> None:
    """End the process with the status that ``run`` returns, or with that of what went wrong."""
    try:
        code = run()
    except NoCredentials as error:
        click.echo(f"Error: {error}", err=True)
        code = BAD_INPUT
    except ApiFault as error:
        click.echo(f"Error: {error}", err=True)
        code = NEEDS_A_PERSON
    sys.exit(code)


def _rotate(cluster: Cluster, terms: Terms, timeout: timedelta, told: Told, *, dry_run: bool) -> Done | Refused | Wait:
    clock = SystemClock()
    if not dry_run:
        return Rotation(cluster, terms, timeout, clock, told).run()
    rehearsal = Rehearsal(cluster.read(clock.now), clock.now())
    return Rotation(rehearsal, terms, _LONG, rehearsal, told, longest_sleep=_LONG.total_seconds()).run()


def _finish(outcome: Done | Refused | Wait, told: Told, output: str) -> int:
    """Say how it ended; return the exit status."""
    text, problems = _ending(outcome), outcome.problems if isinstance(outcome, Refused) else ()
    if output == "json":
        ended = {"outcome": type(outcome).__name__, **_described(outcome)}
        document = {"steps": told.steps, **ended, "problems": [asdict(problem) for problem in problems]}
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(text)
    return NEEDS_A_PERSON if problems else 0


def _ending(outcome: Done | Refused | Wait) -> str:
    match outcome:
        case Done():
            return f"Done: nothing is due until {shown(outcome.until)}" if outcome.until else "Nothing here is ours"
        case Refused():
            return "\n".join(f"Needs a person: {problem}" for problem in outcome.problems)
        case Wait():
            due = f"The next step is due at {shown(outcome.until)}. " if outcome.until else ""
            return f"Not yet: {outcome.reason}. {due}Run it again then; the CronJob does."


def _described(decision: Step | Wait | Done | Refused) -> dict[str, str]:
    """The parts of a decision that are words: what it is about, why, and until when."""
    fields = {name: getattr(decision, name, None) for name in ("configuration", "reason", "until")}
    texts = {name: shown(value) if isinstance(value, datetime) else value for name, value in fields.items()}
    return {name: text for name, text in texts.items() if text}


def _cluster(where: dict[str, Any]) -> Cluster:
    if where["ca_secret"] == where["serving_secret"]:
        raise click.UsageError(
            "--ca-secret and --serving-secret are two: the webhook mounts one, and nobody the other."
        )
    place = Place(
        where["namespace"],
        where["service"],
        where["ca_secret"],
        where["serving_secret"],
        frozenset(where["endpoint"]),
    )
    api, check = Api.connect(where["kubeconfig"]), VersionCheck(_warn)
    return Cluster(api, place, where["selector"], where["port_name"], where["endpoint"], check)


def _warn(message: str) -> None:
    click.echo(f"Warning: {message}", err=True)


def _names(where: dict[str, Any]) -> Names:
    addresses: tuple[Address, ...] = where["ip"]
    return service_names(where["service"], where["namespace"]) + Names(where["dns"], addresses)


def _commands(where: dict[str, Any]) -> Commands:
    namespace, service = where["namespace"], where["service"]
    label = " ".join(f"{key}={value}" for key, value in where["selector"].items())
    return Commands(
        restart=f"kubectl -n {namespace} rollout restart deployment/{service}",
        endpoints=f"kubectl -n {namespace} get pods,endpointslices",
        register=f"kubectl label validatingwebhookconfiguration NAME {label}",
        replace=f"kubectl -n {namespace} delete secret {where['ca_secret']} {where['serving_secret']}",
    )


def _rotate_now(where: dict[str, Any]) -> str:
    return f"kubectl -n {where['namespace']} create job --from=cronjob/vcuda-certs vcuda-certs-now"
