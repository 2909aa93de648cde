"""Measures the memory of a webhook replica in a cluster with many namespaces, without teams and with teams."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus

import click

from bench import load, servers
from bench.arrangements import LIMIT
from bench.hooks import MUTATING, VALIDATING, installed
from bench.plane import Plane, await_ready, create_nodes, gpu_pod, running_plane, write_quota
from bench.rounds import say
from bench.scale import CONNECTIONS, Cost, cost, request
from vcuda.cli import aligned


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--teams", default=100, type=click.IntRange(1), help="Teams.")
@click.option("--namespaces", default=30, type=click.IntRange(1, 500), help="Namespaces of each team.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format.")
def main(*, teams: int, namespaces: int, output: str) -> None:
    """Compare the memory of a replica for the same namespaces, first without teams, then in teams.

    One pod with a GPU is created in each namespace. No controller runs. The measurement takes about five minutes on two
    CPUs. Progress is printed on standard error.
    """
    names = {f"team-{team}": [f"team-{team}-{number}" for number in range(namespaces)] for team in range(teams)}
    every = [namespace for members in names.values() for namespace in members]
    cases: dict[str, Callable[[Plane], None]] = {
        "without-teams": lambda plane: write_quota(plane.cluster, dict.fromkeys(every, LIMIT)),
        "teams": lambda plane: write_quota(
            plane.cluster, {}, {team: {"namespaces": members, **LIMIT} for team, members in names.items()}
        ),
    }
    costs = {name: measured(every, write) for name, write in cases.items()}
    if output == "json":
        click.echo(json.dumps({name: round(used.memory, 1) for name, used in costs.items()}, indent=2))
    else:
        lines = ((name, f"{used.memory:.1f}", f"{used.peak:.1f}", f"{used.cpu:.1f}") for name, used in costs.items())
        click.echo("\n".join(aligned([("replica", "memory MiB", "peak MiB", "CPU s"), *lines])))


def measured(namespaces: list[str], write: Callable[[Plane], None]) -> Cost:
    """Create a pod in each namespace by one webhook replica, and return what the replica has used."""
    with running_plane() as plane:
        write(plane)
        create_nodes(plane.cluster, ("M40",), 10)
        say(f"Creating {len(namespaces)} namespaces")
        for namespace in namespaces:
            plane.cluster.create_namespace(namespace)
        with servers.alone(plane.certificates, plane.our_service()) as webhook:
            await_ready(plane, webhook.url)
            hooks = installed(webhook.url, plane.ca)
            with plane.cluster.register_webhooks(mutating=hooks[MUTATING], validating=hooks[VALIDATING]):
                say("Creating a pod in each namespace")
                pods = (request(plane, namespace, gpu_pod()) for namespace in namespaces)
                server, ca = plane.cluster.server, plane.cluster.ca_file
                load.send_each(server, ca, pods, connections=CONNECTIONS, wanted=HTTPStatus.CREATED)
            return cost(webhook.worker)
