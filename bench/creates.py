"""Creates pods with each arrangement in turn, and compares CPU per pod, rate and latency. See `bench.measuring`."""

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
from bench.rounds import in_order
from tests.e2e.dra import served
from vcuda.cli import FiniteRange

SPREADS = (1, 10)
"""The numbers of namespaces over which the pods are spread by default."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=9, type=click.IntRange(1), help="How often each case is measured; medians count.")
@click.option("--seconds", default=2.0, type=FiniteRange(0.2, 60), help="Load a measurement.")
@click.option(
    "--only", multiple=True, type=click.Choice(EVERY), metavar="ARRANGEMENT", help="Leave out all others; repeatable."
)
@click.option(
    "--namespaces",
    "spreads",
    multiple=True,
    default=SPREADS,
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Over how many the pods are spread; repeatable.",
)
@click.option("--seed", type=int, help="Measure in the order of an earlier run of the same cases, which printed this.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print the figures.")
def main(
    *, rounds: int, seconds: float, only: tuple[str, ...], spreads: tuple[int, ...], seed: int | None, output: str
) -> None:
    """Create pods as fast as 16 clients can, and print what one costs.

    A real etcd and kube-apiserver, from KUBEBUILDER_ASSETS, admit pods that ask for a tenth of a card. Every
    arrangement is measured over 1 and over 10 namespaces, or as many as --namespaces says, by itself:

    \b
      none           no admission of its own
      resourcequota  a Kubernetes ResourceQuota over vcuda cores
      go-idle        two webhooks in Go, mutating and validating, that allow everything
      go-pin         the same, whose mutating one answers the constant patch of a pin: the floor for ours
      flask-pin      go-pin in Flask, on gunicorn's gthread worker
      ours-1         our webhook, one replica, and the controller
      ours-3         our webhook, three replicas, and the controller
      tight-ours-1   ours-1 with quota for 60 pods a namespace, of which 48 are stored at most: then the oldest is
                     deleted for each new one. An exact count admits all; 429 means that the release is awaited
      tight-ours-3   the same with three replicas
      claims-ours-1  ours-1, of ResourceClaims for as much (Kubernetes 1.34 or later)
      claims-none    ResourceClaims with no admission of its own

    CPU ms/pod is what API server, etcd, webhooks and controller take together for each pod that was stored, until the
    controller has counted it; the client that makes the load is not in it. Each round takes the cases in a new random
    order, and the figures are medians of the rounds; refused is the sum. All nine rounds take about 20 minutes on two
    CPUs; progress goes to standard error.

    \b
    Examples:
      python -m bench creates
      python -m bench creates --rounds 3 --only go-pin --only ours-1
          a first look, in 2 minutes
      python -m bench creates -o json > creates.json
          {"<arrangement>": {"<namespaces>": {"cpu_ms_per_pod": …, "by_process": {…}, …}}}

    Exit status: 0 measured, 1 it could not be, 2 bad usage.
    """
    names = chosen(only)
    results = run(names, spreads, rounds, seconds, secrets.randbelow(2**32) if seed is None else seed)
    click.echo(as_json(results) if output == "json" else as_table(results))


def say(line: str) -> None:
    """Report progress to standard error."""
    click.echo(line, err=True)


def chosen(only: Sequence[str]) -> list[str]:
    """Return the arrangements to measure, in the order of the output, without those that this machine does not
    support.
    """
    names = [name for name in EVERY if not only or name in only]
    if go.installed() or not (skipped := [name for name in names if name in IN_GO]):
        return names
    say(f"{', '.join(skipped)} skipped: there is no go on PATH to build bench/webhook.go with")
    left = [name for name in names if name not in IN_GO]
    if not left:
        raise click.ClickException("nothing is left to measure; install Go 1.21 or newer, or choose another --only")
    return left


def run(
    names: Sequence[str], spreads: Sequence[int], rounds: int, seconds: float, seed: int
) -> dict[Case, list[Figures]]:
    """Measure these arrangements. Return the rounds of each case."""
    with tempfile.TemporaryDirectory() as scratch, running_plane() as plane:
        if not served(plane.cluster):
            names = [name for name in names if name not in OF_CLAIMS]
            say("no claims: resource.k8s.io/v1 is not served")
        results: dict[Case, list[Figures]] = {Case(name, spread): [] for name in names for spread in spreads}
        program = go.build(Path(scratch)) if set(IN_GO) & set(names) else None
        prepare(plane, names, max(spreads))
        say(f"seed {seed}")
        for case in in_order(list(results), rounds, seed, say):
            with arranged(plane, case.arrangement, program) as running:
                within = arrangements.namespaces(case.arrangement, case.namespaces)
                results[case].append(measure(plane, running, within, seconds))
    return results
