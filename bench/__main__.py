"""The command ``python -m bench``. It runs one benchmark or several, and prints a table for each."""

from __future__ import annotations

import sys

import click

from bench import creates, discover, events, extender, failover, large_pods, mutate, scale, stale, sweep, teams
from bench.go import BuildFailed
from tools.component import StartupError
from tools.control_plane import NoControlPlane


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(context: click.Context) -> None:
    """Measure this system. The figures are for people, and no test checks them.

    Without a command, all measurements except scale, teams, failover and large-pods run, in about half an hour. Each
    prints a table. `make bench` and `make scale` set KUBEBUILDER_ASSETS, the directory of etcd and kube-apiserver. The
    commands stale, events, discover, sweep, mutate and large-pods need no etcd and no kube-apiserver.
    """
    if context.invoked_subcommand is None:
        for measurement in (stale, events, discover, sweep, mutate, extender):
            measurement.main()
            click.echo()
        context.invoke(creates.main)


MEASUREMENTS = (
    ("mutate", mutate.main, "Requests per second of /mutate, compared with a webhook that does nothing."),
    ("extender", extender.main, "The cost of a placement by the scheduler extender."),
    ("stale", stale.main, "CPU to find the stale allocations of 20,000 pods."),
    ("events", events.main, "CPU to decode an event of a pod."),
    ("discover", discover.main, "CPU to find the GPU models of 5,000 nodes."),
    ("sweep", sweep.main, "CPU of the node agent's sweeps over 10,000 directories."),
    ("large-pods", large_pods.main, "How long reviews of the largest pods delay other reviews."),
)
for name, measure, text in MEASUREMENTS:
    main.add_command(click.Command(name, callback=measure, help=text))
main.add_command(scale.main, "scale")
main.add_command(creates.main, "creates")
main.add_command(failover.main, "failover")
main.add_command(teams.main, "teams")

if __name__ == "__main__":
    try:
        main(prog_name="python -m bench")
    except (NoControlPlane, StartupError, BuildFailed) as error:
        sys.exit(f"Error: {error}")
