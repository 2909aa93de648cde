"""The command of the playground. It starts all processes, changes the teams' workloads, and stops all processes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from examples.playground.cluster import Cluster, create_nodes, hami_scheduler, kwok, nodes, running_cluster
from examples.playground.play import PartEnded, count_rejected, count_running, play
from examples.playground.programs import Unusable, link_commands, provide
from examples.playground.system import NotInstalled, System, apply, apply_system
from examples.playground.teams import ALL, deployment_manifest, namespace_manifest, quota_manifest
from examples.playground.texts import verdict, welcome
from tools.component import Component, StartupError
from tools.control_plane import ADMIN, write_kubeconfig
from vcuda.errors import VcudaError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""The exit status if a signal ended the command before the playground was ready, or before the --seconds ended."""


class Stopped(BaseException):
    """Raised when a signal, such as that of Ctrl-C, ends the playground."""


class NothingShown(Exception):
    """Raised if no pod of the teams was admitted, or if no pod was rejected. The message says which is the case."""


FAILURES = (Unusable, NotInstalled, PartEnded, NothingShown, StartupError, VcudaError, OSError)


@dataclass(frozen=True)
class Playground:
    """A playground that is ready.

    ``cluster``: the control plane with the simulated nodes.
    ``system``: vcuda quota, installed in that cluster.
    ``parts``: all processes of the playground.
    """

    cluster: Cluster
    system: System
    parts: tuple[Component, ...]


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(min=1), help="Seconds until the playground ends.  [default: it ends at Ctrl-C]"
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the random changes.")
def main(seconds: float | None, seed: int) -> None:
    """Run a Kubernetes control plane on this machine, with simulated GPU nodes, vcuda quota, and three busy teams.

    The control plane and vcuda quota are real. The nodes, their 8 A100 and 16 T4 cards, and the containers are
    simulated. The programs of the control plane are built once, which needs Go and about 6 minutes. All servers listen
    on 127.0.0.1, and end with this command. With --seconds, the command also checks that a pod was admitted and that
    another pod was rejected.

    \b
    Examples:
      python -m examples.playground
      python -m examples.playground --seconds 60

    Exit status: 0 the playground ended by Ctrl-C or after --seconds; 1 a program failed, or in --seconds no pod was
    admitted or no pod was rejected; 130 a signal ended the command earlier.
    """
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        with tempfile.TemporaryDirectory(prefix="vcuda-playground-") as scratch, ExitStack() as stack:
            try:
                playground = start(Path(scratch), stack)
                run(playground, seed, seconds)
            finally:
                _ignore_signals()
                click.echo("\nStopping …")
    except Stopped:
        sys.exit(INTERRUPTED)
    except FAILURES as error:
        raise click.ClickException(str(error)) from error
    click.echo("All processes have ended, and their files are deleted.")


def start(directory: Path, stack: ExitStack) -> Playground:
    """Start every process of the playground, and print how to use it. The caller closes ``stack`` to stop them.

    Raises one of `FAILURES` if a process does not start.
    """
    click.echo("Preparing the programs. The first run builds the programs in about 6 minutes.")
    programs = provide(directory / "programs", os.environ)
    with step("Starting etcd, kube-apiserver, kube-scheduler and kube-controller-manager"):
        cluster = stack.enter_context(running_cluster(programs, directory / "control-plane"))
    with step("Starting 6 simulated nodes with 8 A100 and 16 T4 cards"):
        simulators = [stack.enter_context(part.started()) for part in (kwok(cluster), hami_scheduler(cluster))]
        create_nodes(cluster.kube, list(nodes()))
    with step("Installing vcuda quota: manifests, certificates, webhook and controller"):
        system = apply_system(cluster, directory)
        system.issue_certificates()
        ours = [stack.enter_context(part.started()) for part in (system.webhook(), system.controller())]
        system.register()
    with step("Creating the quota and the workloads of three teams"):
        apply(cluster, [*map(namespace_manifest, ALL), quota_manifest()])
        system.await_admission()
        apply(cluster, [deployment_manifest(team) for team in ALL])
        system.await_usage()
    commands = directory / "bin"
    link_commands(commands, programs)
    write_kubeconfig(directory / "kubeconfig", cluster.plane.server, cluster.plane.ca_file, cluster.plane.tokens[ADMIN])
    click.echo(welcome(directory, commands, system.page))
    return Playground(cluster, system, (*cluster.plane.components, *simulators, *ours))


def run(playground: Playground, seed: int, seconds: float | None) -> None:
    """Change the teams' workloads for ``seconds`` seconds, or until Ctrl-C if it is None.

    Raises PartEnded if a process ends. Raises NothingShown if no pod was admitted, or no pod was rejected.
    """
    kube = playground.cluster.kube
    if seconds is None:
        click.echo("The teams change their workloads. Ctrl-C stops the playground.")
        with suppress(Stopped):
            play(kube, playground.parts, seed, None)
        return
    click.echo(f"The teams change their workloads for {seconds:g} s.")
    play(kube, playground.parts, seed, seconds)
    running, rejected = count_running(kube), count_rejected(kube)
    click.echo(f"The teams have {running} running pods, and {rejected} workloads with a rejected pod.")
    if problem := verdict(running, rejected):
        raise NothingShown(problem)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print the name of a step at the start of the ``with`` statement, and the duration at the end."""
    click.echo(f"{what} … ", nl=False)
    began = time.monotonic()
    try:
        yield
    except BaseException:
        click.echo()
        raise
    click.echo(f"{time.monotonic() - began:.0f} s")


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    _ignore_signals()
    raise Stopped


def _ignore_signals() -> None:
    """Ignore every further signal, because a second Ctrl-C must not interrupt the cleanup after the first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
