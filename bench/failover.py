"""Measures how long freed quota stays unusable after the leading controller has ended."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from typing import NamedTuple

import click
import msgspec

from bench.arrangements import hooks, webhooks
from bench.hooks import MUTATING, VALIDATING, policies_in_effect
from bench.plane import SYSTEM_NAMESPACE, Plane, await_ready, create_nodes, gpu_pod, running_plane, write_quota
from bench.rounds import say
from tests.processes import ControllerProcess, eventually
from vcuda.cli import aligned

OURS = "ours-3"
NAMESPACES = tuple(f"failover-{number}" for number in range(5))
CARDS, PODS = 4, 40
"""The quota of a namespace in cards, and the number of pods that use it up. A pod requests a tenth of a card."""
CLIENTS = 16
CHURN_SECONDS = 5.0
"""Seconds for which pods are created and deleted at the limit: first before the leader ends, and then after its end."""
MAX_SECONDS = 180.0
PAUSE_SECONDS = 0.05
KILLED, STOPPED = "killed", "stopped"


class Failover(msgspec.Struct, frozen=True):
    """The delays that clients saw after the end of the leader.

    ``pause``: the longest time between two creates that succeeded, in seconds.
    ``full``: the seconds until the whole limit of every namespace was in use again.
    """

    pause: float
    full: float


class Round(NamedTuple):
    """One round of the benchmark: its two controllers, and how the leader is ended."""

    leader: ControllerProcess
    standby: ControllerProcess
    end: str


class Churn:
    """Clients that keep every namespace at its limit. While `deletes` is set, a client deletes a pod after a
    rejection."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._stored: dict[str, deque[str]] = {namespace: deque() for namespace in NAMESPACES}
        self._turns = itertools.cycle(NAMESPACES)
        self._lock = threading.Lock()
        self.deletes = threading.Event()
        self.ended = threading.Event()
        self.created: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self.ended.set()
            for each in clients:
                each.result()

    @property
    def is_full(self) -> bool:
        return all(len(stored) == PODS for stored in self._stored.values())

    def _client(self) -> None:
        rest = self._plane.cluster.rest
        while not self.ended.is_set():
            with self._lock:
                namespace = next(self._turns)
            path = f"/api/v1/namespaces/{namespace}/pods"
            answer = rest.send("POST", path, gpu_pod())
            if answer.status == HTTPStatus.CREATED:
                self._stored[namespace].append(answer.body["metadata"]["name"])
                self.created.append(time.monotonic())
                continue
            if self.deletes.is_set() and self._stored[namespace]:
                rest.send("DELETE", f"{path}/{self._stored[namespace].popleft()}", {"gracePeriodSeconds": 0})
            self.ended.wait(PAUSE_SECONDS)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", default=3, type=click.IntRange(1), help="Rounds for each way to end; figures are medians.")
@click.option("--seconds", default=CHURN_SECONDS, type=float, help="Seconds of load before and after the end.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format.")
def main(*, rounds: int, seconds: float, output: str) -> None:
    """End the leading controller while pods are created and deleted at the limit, and print how long clients waited.

    Three replicas of the webhook and two controllers run. 16 clients keep five namespaces at their limit of 40 pods
    each, and delete the oldest pod when a new one is rejected. Then the leader is killed, or stopped by SIGTERM. After
    some more seconds, the clients only create.

    \b
      pause s   the longest time between two creates that succeeded, after the end of the leader
      full s    the time from the end of the leader until every namespace is at its limit again

    Exit status: 0 success, 1 a measurement failed, 2 bad usage.
    """
    results = run(rounds, seconds)
    medians = {
        end: {name: statistics.median(getattr(each, name) for each in found) for name in ("pause", "full")}
        for end, found in results.items()
    }
    if output == "json":
        click.echo(json.dumps(medians))
        return
    rows = [("leader", "pause s", "full s")]
    rows += [(end, f"{each['pause']:.1f}", f"{each['full']:.1f}") for end, each in medians.items()]
    click.echo("\n".join(aligned(rows)))


def run(rounds: int, seconds: float) -> dict[str, list[Failover]]:
    """Return the delays of every round, by the way in which the leader was ended."""
    results: dict[str, list[Failover]] = {KILLED: [], STOPPED: []}
    with running_plane() as plane, ExitStack() as stack:
        prepare(plane, stack)
        churn = Churn(plane)
        leader = stack.enter_context(controller(plane))
        leader.await_synced()
        with churn.running():
            for number, end in itertools.product(range(rounds), results):
                standby = stack.enter_context(controller(plane))
                await_standby(standby)
                results[end].append(measure(churn, Round(leader, standby, end), seconds))
                say(f"Round {number + 1} of {rounds}, leader {end}: {results[end][-1]}")
                leader = standby
    return results


def prepare(plane: Plane, stack: ExitStack) -> None:
    """Set the quota, and start and register three replicas of the webhook."""
    write_quota(plane.cluster, {namespace: {"quota": {"M40": CARDS}} for namespace in NAMESPACES})
    create_nodes(plane.cluster, ("M40",), 10)
    for namespace in NAMESPACES:
        plane.cluster.create_namespace(namespace)
    running = [stack.enter_context(server) for server in webhooks(plane, OURS, None)]
    stack.enter_context(policies_in_effect(plane.cluster, NAMESPACES[0]))
    for server in running:
        await_ready(plane, server.url)
    registered = hooks(plane, OURS, running)
    stack.enter_context(
        plane.cluster.register_webhooks(mutating=registered[MUTATING], validating=registered[VALIDATING])
    )


def controller(plane: Plane) -> ControllerProcess:
    return ControllerProcess(
        *("--kubeconfig", plane.kubeconfig("vcuda-controller"), "--status-address", "127.0.0.1:0"),
        *("--system-namespace", SYSTEM_NAMESPACE),
    )


def await_standby(standby: ControllerProcess) -> None:
    eventually(lambda: standby.get("/readyz").status == HTTPStatus.OK, lambda: "the standby is not ready")


def measure(churn: Churn, controllers: Round, seconds: float) -> Failover:
    """End the leader under load. Return the delays until the whole limit was in use again."""
    churn.deletes.set()
    time.sleep(seconds)
    if controllers.end == KILLED:
        controllers.leader.kill()
    else:
        controllers.leader.terminate()
    ended = time.monotonic()
    time.sleep(seconds)
    churn.deletes.clear()
    eventually(lambda: churn.is_full, lambda: "the limit is not in use", MAX_SECONDS)
    full = time.monotonic() - ended
    controllers.standby.await_synced()
    return Failover(longest_pause(churn.created, ended), full)


def longest_pause(created: Sequence[float], ended: float) -> float:
    """Return the longest time between two successive moments of ``created``, beginning at ``ended``."""
    moments = [ended, *(moment for moment in sorted(created) if moment > ended)]
    return max((after - before for before, after in itertools.pairwise(moments)), default=0.0)
