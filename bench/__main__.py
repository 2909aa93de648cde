"""The command ``python -m bench``. It runs the usual measurements, or a single one, and prints a table for each."""

from __future__ import annotations

import sys

import click

from bench import creates, discover, events, extender, large_pods, mutate, scale, stale, sweep
from bench.go import BuildFailed
from tools.component import StartupError
from tools.control_plane import NoControlPlane


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Measure this system. The figures are for a person to read, and no test asserts them.

    Without a command: all except scale and large-pods, one table each, in about half an hour. `make bench` and `make
    scale` set KUBEBUILDER_ASSETS, the directory of etcd and kube-apiserver. The commands stale, events, discover,
    sweep, mutate and large-pods do not need it.
    """
    if context.invoked_subcommand is None:
        for measurement in (stale, events, discover, sweep, mutate, extender):
            measurement.main()
            click.echo()
        context.invoke(creates.main)


@main.command("mutate")
def _mutate() -> None:
    """Requests per second of /mutate, compared with a webhook that does nothing."""
    mutate.main()


@main.command("extender")
def _extender() -> None:
    """The cost of a placement for the scheduler."""
    extender.main()


@main.command("stale")
def _stale() -> None:
    """CPU to decide which of 20,000 allocations are stale."""
    stale.main()


@main.command("events")
def _events() -> None:
    """CPU to decode an event of a pod."""
    events.main()


@main.command("discover")
def _discover() -> None:
    """CPU to find the GPU models of 5,000 nodes."""
    discover.main()


@main.command("sweep")
def _sweep() -> None:
    """CPU of the node agent's sweeps over 10,000 directories."""
    sweep.main()


@main.command("large-pods")
def _large_pods() -> None:
    """How long reviews of the largest pods delay other reviews."""
    large_pods.main()


main.add_command(scale.main, "scale")
main.add_command(creates.main, "creates")

if __name__ == "__main__":
    try:
        main(prog_name="python -m bench")
    except (NoControlPlane, StartupError, BuildFailed) as error:
        sys.exit(f"Error: {error}")
