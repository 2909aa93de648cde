"""Pods a second that the API server stores: with no admission of its own, ResourceQuota, idle webhooks, and ours.

Every arrangement is measured in short rounds, in turn with all others, so that a slow minute touches all alike; a
ratio is the median of the rounds' own. Each arrangement has namespaces of its own, so all stay registered throughout.
The leading controller runs all the time, as it does in a cluster.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from tests.bench import load, servers
from tests.bench.plane import (
    Plane,
    await_ready,
    create_nodes,
    gpu_pod,
    hook,
    running_controller,
    running_plane,
    write_quota,
)
from tests.e2e.rest import Json
from vcuda.tables import aligned

ROUNDS, SECONDS, CONNECTIONS, REPLICAS = 5, 2.0, 16, 3
SPREADS = (1, 10)
"""Over how many namespaces the pods are spread."""

NOTHING, QUOTA, PLAIN, IDLE, PINNING, ONE, THREE = (
    "no webhook",
    "ResourceQuota",
    "two Flask webhooks that do nothing",
    "the same on our server",
    "two webhooks that only pin",
    "ours, 1 replica",
    "ours, 3 replicas",
)
IDLE_SERVERS = {IDLE: servers.IdleServer, PINNING: servers.PinningServer}
"""Those that only pin show what the API server itself pays for a patch, whoever makes it."""

ARRANGED_BY, ASKS = "bench.vcuda.io/arrangement", "bench.vcuda.io/asks"
SETTLED_SECONDS = 60.0


class Arrangement(NamedTuple):
    """One way to admit pods: its name, its namespaces, and how many replicas its callers spread over."""

    name: str
    namespaces: Sequence[str]
    replicas: int = 1

    @property
    def selector(self) -> Mapping[str, str]:
        """The label of its namespaces."""
        return {ARRANGED_BY: self.namespaces[0]}


def arrangements() -> Sequence[Arrangement]:
    """All that are compared; each has as many namespaces as the widest spread."""
    most = range(max(SPREADS))
    return tuple(
        Arrangement(name, [f"{short}-{number}" for number in most], replicas)
        for name, short, replicas in (
            (NOTHING, "nothing", 1),
            (QUOTA, "quota", 1),
            (PLAIN, "plain", 1),
            (IDLE, "idle", 1),
            (PINNING, "pinning", 1),
            (ONE, "one", 1),
            (THREE, "three", REPLICAS),
        )
    )


def main() -> None:
    """Print the table."""
    every = arrangements()
    with running_plane() as plane, installed(plane, every):
        results: dict[tuple[str, int], list[load.Result]] = {}
        for _ in range(ROUNDS):
            for spread in SPREADS:
                for arrangement in every:
                    result = measure(plane, arrangement, arrangement.namespaces[:spread])
                    results.setdefault((arrangement.name, spread), []).append(result)
    print("\n".join(aligned([HEADING, *(row(key, results) for key in sorted(results, key=lambda key: key[1]))])))


HEADING = ("creates of pods", "namespaces", "pods/s", "p50 ms", "p99 ms", "refused", "rate of idle", "p99 of idle")


def row(key: tuple[str, int], results: Mapping[tuple[str, int], Sequence[load.Result]]) -> tuple[str, ...]:
    """One line of the table: medians of the rounds, and of their ratios to the webhooks that do nothing."""
    name, spread = key
    mine, idle = results[key], results[IDLE, spread]
    rate = statistics.median(ours.rate / theirs.rate for ours, theirs in zip(mine, idle, strict=True))
    p99 = statistics.median(ours.p99 / theirs.p99 for ours, theirs in zip(mine, idle, strict=True))
    medians = [statistics.median(column) for column in zip(*mine, strict=True)]
    figures = (f"{medians[0]:.0f}", f"{medians[1]:.1f}", f"{medians[2]:.1f}", f"{sum(one.refused for one in mine)}")
    return (name, str(spread), *figures, f"{rate:.2f}", f"{p99:.2f}")


def measure(plane: Plane, arrangement: Arrangement, namespaces: Sequence[str]) -> load.Result:
    """One round, and everything as before it again."""
    server = plane.cluster.server
    requests = [
        load.post(
            f"{server}/api/v1/namespaces/{namespaces[number % len(namespaces)]}/pods",
            json.dumps(gpu_pod({ASKS: str(number % arrangement.replicas)})).encode(),
            {"Authorization": plane.authorization},
        )
        for number in range(CONNECTIONS)
    ]
    result = load.run(server, plane.cluster.ca_file, requests, seconds=SECONDS, wanted=HTTPStatus.CREATED)
    for namespace in namespaces:
        clear(plane, namespace)
    return result


def clear(plane: Plane, namespace: str) -> None:
    """Delete the pods, and return once the ledger, where there is one, holds nothing any more."""
    plane.cluster.rest.send("DELETE", f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0}).ok()
    deadline = time.monotonic() + SETTLED_SECONDS
    while (ledger := plane.ledger(namespace)[0]).pending or ledger.committed:
        if time.monotonic() > deadline:
            raise TimeoutError(f"still charged after {SETTLED_SECONDS:g} s: {ledger}")
        time.sleep(0.1)


@contextmanager
def installed(plane: Plane, every: Sequence[Arrangement]) -> Iterator[None]:
    """`with` this, every arrangement is in effect in its namespaces."""
    limited = {
        name: {"quota": {"M40": 100_000, "P100": 100_000}}
        for arrangement in every
        if arrangement.name in (ONE, THREE)
        for name in arrangement.namespaces
    }
    write_quota(plane.cluster, limited)
    create_nodes(plane.cluster, ("M40", "P100"), 10)
    for arrangement in every:
        for namespace in arrangement.namespaces:
            plane.cluster.create_namespace(namespace, arrangement.selector)
            if arrangement.name == QUOTA:
                limit(plane, namespace)
    with ExitStack() as stack:
        hooks = [stack.enter_context(served(plane, arrangement)) for arrangement in every]
        stack.enter_context(running_controller(plane, Path("/dev/null")))
        asked = {path: [one for group in hooks for one in group[path]] for path in ("mutate", "validate")}
        stack.enter_context(plane.cluster.register_webhooks(mutating=asked["mutate"], validating=asked["validate"]))
        yield


@contextmanager
def served(plane: Plane, arrangement: Arrangement) -> Iterator[Mapping[str, Sequence[Json]]]:
    """The arrangement's webhooks by their path, running; none where it has none."""
    with ExitStack() as stack:
        urls: list[str] = []
        if arrangement.name == PLAIN:
            urls = [stack.enter_context(servers.plain(plane.certificates)).url]
        if arrangement.name in IDLE_SERVERS:
            urls = [stack.enter_context(servers.idle(plane.certificates, IDLE_SERVERS[arrangement.name])).url]
        if arrangement.name in (ONE, THREE):
            ours = [servers.ours(plane.certificates, plane.our_service()) for _ in range(arrangement.replicas)]
            urls = [stack.enter_context(server).url for server in ours]
            for url in urls:
                await_ready(plane, url)
        yield {
            path: [
                hook(
                    plane,
                    f"{url}/{path}",
                    f"{path}-{arrangement.namespaces[0]}-{number}",
                    arrangement.selector,
                    {ASKS: str(number)},
                )
                for number, url in enumerate(urls)
            ]
            for path in ("mutate", "validate")
        }


def limit(plane: Plane, namespace: str) -> None:
    """A ResourceQuota that nothing fills, in effect; its controller, which would say so in its status, does not run."""
    hard = {"requests.tencent.com/vcuda-core": "1000000000"}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    metadata = {"name": "cores"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
    plane.cluster.rest.send("POST", path, quota).ok()
    status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
    plane.cluster.rest.merge_patch(f"{path}/cores/status", {"status": status})
