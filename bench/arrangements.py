"""The arrangements (ways to admit pods) that the benchmarks compare. Each arrangement is measured alone.

While one arrangement is measured, the webhooks of all others are neither running nor registered. Even webhooks whose
selectors match no pod cost the API server CPU: fourteen such webhooks add a fifth to the CPU per pod. The controller
and the policies of vcuda quota are active only while its own webhook is measured. So the figures of other arrangements
do not include the CPU that the controller and the policies cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import go, seed, servers
from bench.hooks import MUTATING, VALIDATING, Webhooks, installed, policies_in_effect, simple
from bench.plane import Plane, await_ready, create_nodes, running_controller, write_quota
from bench.servers import Server
from tools.ports import free_ports

NONE, QUOTA, GO_IDLE, GO_PIN, FLASK_PIN = "none", "resourcequota", "go-idle", "go-pin", "flask-pin"
CLAIMS_NONE, CLAIMS_OURS, OURS_1 = "claims-none", "claims-ours-1", "ours-1"
TIGHT = ("tight-ours-1", "tight-ours-3")
TEAMS = ("team-ours-1", "team-ours-3")
OURS: Mapping[str, int] = {
    OURS_1: 1,
    "ours-3": 3,
    **dict(zip(TIGHT + TEAMS, (1, 3, 1, 3), strict=True)),
    CLAIMS_OURS: 1,
}
"""For each arrangement with vcuda quota's webhook: the number of replicas of the webhook."""

EVERY = (NONE, QUOTA, GO_IDLE, GO_PIN, FLASK_PIN, *OURS, CLAIMS_NONE)
OF_CLAIMS = (CLAIMS_NONE, CLAIMS_OURS)
IN_GO = (GO_IDLE, GO_PIN)

LIMIT = {"quota": {"M40": 100_000, "P100": 100_000, "A100": 100_000}}
"""The quota of a namespace, in cards. No measurement uses it up."""

TIGHT_LIMIT = {"quota": {"M40": 6}}
"""A small quota of a namespace, in cards. 60 pods of the benchmark use it up."""

STORED_OF_TIGHT = 48
"""The maximum number of stored pods in a namespace with the quota `TIGHT_LIMIT`, which admits 60 pods. So a rejection
means that charges of deleted pods are not released yet."""


class Arranged(NamedTuple):
    """An arrangement (a way to admit pods) whose processes run and whose webhooks are registered.

    ``processes``: for each program, the ids of the processes whose CPU time is measured.
    ``recounts``: True if a controller runs, which counts the stored pods into the ledgers.
    ``claims``: True if ResourceClaims are created instead of pods.
    ``most``: the maximum number of stored pods per namespace, after which each new pod replaces the oldest pod. None if
    no pod is deleted.
    """

    processes: Mapping[str, Sequence[int]]
    recounts: bool
    claims: bool = False
    most: int | None = None


def namespaces(name: str, spread: int) -> list[str]:
    """Return the names of the first ``spread`` namespaces that belong to the arrangement."""
    return [f"{name}-{number}" for number in range(spread)]


def prepare(plane: Plane, names: Sequence[str], most: int) -> None:
    """Create the namespaces of each arrangement, and set their quota."""
    limits = {name: TIGHT_LIMIT if name in TIGHT else LIMIT for name in names if name in OURS and name not in TEAMS}
    quota = {namespace: limit for name, limit in limits.items() for namespace in namespaces(name, most)}
    teams = {name: {"namespaces": namespaces(name, most), **LIMIT} for name in names if name in TEAMS}
    write_quota(plane.cluster, quota, teams)
    create_nodes(plane.cluster, ("M40", "P100"), 10)
    if set(names) & set(OF_CLAIMS):
        seed.serve_classes(plane)
        seed.write(plane, [seed.node(seed.SHARED), seed.resource_slice(seed.SHARED)])
    for name in names:
        for namespace in namespaces(name, most):
            plane.cluster.create_namespace(namespace)
            if name == QUOTA:
                limit(plane, namespace)


def limit(plane: Plane, namespace: str) -> None:
    """Create a ResourceQuota that is never used up. Also write its status, because no controller manager runs."""
    hard = {"requests.tencent.com/vcuda-core": "1000000000"}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    metadata = {"name": "cores"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
    plane.cluster.rest.send("POST", path, quota).ok()
    status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
    plane.cluster.rest.merge_patch(f"{path}/cores/status", {"status": status})


@contextmanager
def arranged(plane: Plane, name: str, program: Path | None) -> Iterator[Arranged]:
    """Run the processes of the arrangement and register its webhooks during the ``with`` block.

    ``program``: the path of the webhook in Go; None if the arrangement does not use it.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(server) for server in webhooks(plane, name, program)]
        processes = {**plane.processes, "webhook": [server.pid for server in running]}
        if name in OURS:
            [first] = namespaces(name, 1)
            stack.enter_context(policies_in_effect(plane.cluster, first))
            for server in running:
                await_ready(plane, server.url)
            controller = stack.enter_context(running_controller(plane))
            controller.await_synced()
            processes["controller"] = [controller.process.pid]
        registered = hooks(plane, name, running)
        stack.enter_context(
            plane.cluster.register_webhooks(mutating=registered[MUTATING], validating=registered[VALIDATING])
        )
        yield Arranged(processes, name in OURS, name in OF_CLAIMS, STORED_OF_TIGHT if name in TIGHT else None)


def webhooks(plane: Plane, name: str, program: Path | None) -> list[AbstractContextManager[Server]]:
    """Return the webhook servers of the arrangement, which the caller must start. Empty if it has no webhooks."""
    if name in IN_GO:
        assert program
        return [go.serving(program, plane.certificates, pins=name == GO_PIN)]
    if name == FLASK_PIN:
        return [servers.pinning(plane.certificates)]
    [shared] = free_ports(1)
    return [servers.ours(plane.certificates, plane.our_service(), shared) for _ in range(OURS.get(name, 0))]


def hooks(plane: Plane, name: str, running: Sequence[Server]) -> Webhooks:
    """Return the webhooks to register for the arrangement. ``running``: the servers that the API server will call."""
    if not running:
        return {MUTATING: (), VALIDATING: ()}
    register = installed if name in OURS else simple
    return register(running[0].called, plane.ca)
