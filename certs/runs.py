"""Runs a rotation or a report for the commands of `vcuda-certs`, prints the output and sets the exit status."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import NoReturn

import click
import msgspec

from certs import plan, report, rotation
from certs.cluster import ClusterStore
from certs.steps import Done, End, RotationPolicy, Step, StepRejected, Wait
from vcuda import cli, errors

NEEDS_A_PERSON = 1
OUTPUT = cli.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")

_LONG = timedelta(days=36500)


@dataclass(frozen=True, slots=True)
class StepLog:
    """Records each step and each wait of a run in ``steps``, and immediately prints it with ``say``."""

    say: Callable[[str], None]
    steps: list[dict[str, str]] = field(default_factory=list)

    def __call__(self, decision: Step | Wait) -> None:
        entry = {"step": type(decision).__name__, **_described(decision)}
        self.steps.append(entry)
        self.say(" ".join(entry.values()))


def execute(
    store: Callable[[], rotation.RotationStore],
    policy: RotationPolicy,
    timeout: timedelta,
    *,
    dry_run: bool,
    output: str,
) -> NoReturn:
    """Run a rotation, print its steps, and exit the process. ``timeout``: the total time that the run may wait."""
    log = StepLog(click.echo if output == "table" else lambda _: None)
    clock = rotation.Clock()

    def run() -> int:
        if not dry_run:
            return _finish(rotation.Rotation(store(), policy, timeout, clock, log).run(), log, output)
        copy = rotation.DryRunStore(store().read(clock.now), clock.now())
        longest = _LONG.total_seconds()
        rehearsal = rotation.Rotation(copy, policy, _LONG, copy, log, longest_sleep=longest, simulated=True)
        return _finish(rehearsal.run(), log, output)

    with_faults(run)


def show_report(
    store: Callable[[], ClusterStore], policy: RotationPolicy, job: str, output: str, *, registered: bool = False
) -> NoReturn:
    """Print a report on the certificates, and exit. ``job``: the name of the CronJob that runs the rotation.

    ``registered``: True if missing webhook configurations and policies are reported too.
    """

    def run() -> int:
        there, clock = store(), rotation.Clock()
        again = f"kubectl -n {there.refs.namespace} create job --from=cronjob/{job} {job}-now"
        state = there.read(clock.now)
        found = report.report_on(state, there.refs, clock.now(), policy, again, job=there.running_job(job))
        if registered:
            problems = dict.fromkeys((*found.problems, *there.missing(state)))
            found = msgspec.structs.replace(found, problems=tuple(problems))
        click.echo({"table": report.certificate_table, "json": report.document}[output](found))
        return NEEDS_A_PERSON if found.problems else 0

    with_faults(run)


def with_faults(run: Callable[[], int]) -> NoReturn:
    """Call ``run``, and exit the process with the status that it returns. If it raises VcudaError, print the error."""
    try:
        sys.exit(run())
    except errors.VcudaError as error:
        cli.fail(rotation.explained(error), cli.BAD_INPUT if isinstance(error, errors.BadInput) else NEEDS_A_PERSON)


def _finish(outcome: End, log: StepLog, output: str) -> int:
    problems = outcome.problems if isinstance(outcome, StepRejected) else ()
    if output == "json":
        name = "Rejected" if problems else type(outcome).__name__
        document = {"steps": log.steps, "outcome": name, **_described(outcome), "problems": [*map(asdict, problems)]}
        click.echo(json.dumps(document, indent=2))
    else:
        click.echo(_ending(outcome))
    return NEEDS_A_PERSON if problems else 0


def _ending(outcome: End) -> str:
    match outcome:
        case Done():
            return (
                f"Done: no step is due until {plan.shown_utc(outcome.until)}"
                if outcome.until
                else f"Done: {outcome.reason}"
            )
        case StepRejected():
            return "\n".join(f"Needs a person: {problem}" for problem in outcome.problems)
        case Wait():
            due = f"The next step is due at {plan.shown_utc(outcome.until)}. " if outcome.until else ""
            return f"Not finished: {outcome.reason}. {due}Run the command again later, or leave it to the CronJob."


def _described(decision: Step | End) -> dict[str, str]:
    fields = {name: getattr(decision, name, None) for name in ("configuration", "reason", "until")}
    texts = {name: plan.shown_utc(value) if isinstance(value, datetime) else value for name, value in fields.items()}
    return {name: text for name, text in texts.items() if text}
