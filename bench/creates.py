"""Creates pods under different arrangements (ways to admit pods), and compares CPU per pod, rate and latency."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from bench import arrangements, go
from bench.arrangements import EVERY, IN_GO, OF_CLAIMS, arranged, prepare
from bench.figures import Case, Figures, as_json, as_table
from bench.measuring import measure
from bench.plane import running_plane
from bench.rounds import NO_CLAIMS, in_order, say
from tests.e2e.dra import served
from vcuda.cli import FiniteRange

SPREADS = (1, 10)
"""The numbers of namespaces over which the benchmark spreads its pods by default."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=9, type=click.IntRange(1), help="Rounds per case; the figures are medians.")
@click.option("--seconds", default=2.0, type=FiniteRange(0.2, 60), help="Duration of the load of a measurement.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(EVERY),
    metavar="ARRANGEMENT",
    help="Arrangement to measure; repeatable.  [default: all]",
)
@click.option(
    "--namespaces",
    "spreads",
    multiple=True,
    default=SPREADS,
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Number of namespaces in which pods are created; repeatable.",
)
@click.option("--seed", type=int, help="Seed that an earlier run has printed, for the same order of measurements.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format.")
def main(
    *, rounds: int, seconds: float, only: tuple[str, ...], spreads: tuple[int, ...], seed: int | None, output: str
) -> None:
    """Create pods as fast as 16 clients can, and print the cost of a pod.

    A real etcd and kube-apiserver, from KUBEBUILDER_ASSETS, admit pods that request a tenth of a card. Each
    arrangement is measured by itself, with 1 and with 10 namespaces, or with the number in --namespaces:

    \b
      none           no webhook and no quota
      resourcequota  a Kubernetes ResourceQuota over vcuda cores
      go-idle        two webhooks in Go, mutating and validating, that allow everything
      go-pin         go-idle, but /mutate returns a constant patch: the minimum cost of ours
      flask-pin      go-pin in Flask, on gunicorn's gthread worker
      ours-1         our webhook, one replica, and the controller
      ours-3         our webhook, three replicas, and the controller
      tight-ours-1   ours-1 with quota for 60 pods per namespace. At most 48 are stored; then each new pod replaces
                     the oldest. An exact count admits all. The column "releasing" counts the rejections
                     because the charge of a deleted pod is not released yet
      tight-ours-3   tight-ours-1 with three replicas
      team-ours-1    ours-1, but the namespaces are one team, and only the team has a quota
      team-ours-3    team-ours-1 with three replicas
      claims-ours-1  ours-1 with ResourceClaims for the same request (Kubernetes 1.34 or later)
      claims-none    none with ResourceClaims

    CPU ms/pod is the CPU time of API server, etcd, webhooks and controller for each stored pod, until the controller
    has counted it. The client is not included. Each round measures the cases in a new random order. The figures are
    medians of the rounds, except rejected, which is the sum. All nine rounds take about 20 minutes on two CPUs.
    Progress goes to standard error.

    \b
    Examples:
      python -m bench creates
      python -m bench creates --rounds 3 --only go-pin --only ours-1
          a first look, in 2 minutes
      python -m bench creates -o json > creates.json
          {"<arrangement>": {"<namespaces>": {"cpu_ms_per_pod": …, "by_process": {…}, …}}}

    Exit status: 0 success, 1 a measurement failed, 2 bad usage.
    """
    names = chosen(only)
    results = run(names, spreads, rounds, seconds, secrets.randbelow(2**32) if seed is None else seed)
    click.echo(as_json(results) if output == "json" else as_table(results))


def chosen(only: Sequence[str]) -> list[str]:
    """Return the arrangements to measure, in the order of the output.

    If Go is not installed, the arrangements with the webhook in Go are left out.
    """
    names = [name for name in EVERY if not only or name in only]
    if go.installed() or not (skipped := [name for name in names if name in IN_GO]):
        return names
    say(f"{', '.join(skipped)} cannot be measured, because Go was not found on PATH. Go builds bench/webhook.go")
    left = [name for name in names if name not in IN_GO]
    if not left:
        raise click.ClickException("no arrangement can be measured. Install Go 1.21 or newer, or change --only")
    return left


def run(
    names: Sequence[str], spreads: Sequence[int], rounds: int, seconds: float, seed: int
) -> dict[Case, list[Figures]]:
    """Measure these arrangements (ways to admit pods) in several rounds.

    Return for each case (an arrangement with a number of namespaces) the measured values of every round.
    """
    with tempfile.TemporaryDirectory() as scratch, running_plane() as plane:
        if not served(plane.cluster):
            names = [name for name in names if name not in OF_CLAIMS]
            say(NO_CLAIMS)
        results: dict[Case, list[Figures]] = {Case(name, spread): [] for name in names for spread in spreads}
        program = go.build(Path(scratch)) if set(IN_GO) & set(names) else None
        prepare(plane, names, max(spreads))
        say(f"To repeat the order of measurements, pass --seed {seed}")
        for case in in_order(list(results), rounds, seed):
            with arranged(plane, case.arrangement, program) as running:
                within = arrangements.namespaces(case.arrangement, case.namespaces)
                results[case].append(measure(plane, running, within, seconds))
    return results
