"""The ways to admit pods that are compared, each by itself.

While one is measured nothing of the others runs, and none of their webhooks is registered: fourteen that were asked
nothing, for their selectors, cost the API server a fifth more for each pod. The controller runs, and our policies are
in effect, with ours alone: in the figures of the others there is neither its work nor what those and its watches cost
the API server.
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
OURS: Mapping[str, int] = {OURS_1: 1, "ours-3": 3, "tight-ours-1": 1, "tight-ours-3": 3, CLAIMS_OURS: 1}
"""Ours, by the number of replicas."""

EVERY = (NONE, QUOTA, GO_IDLE, GO_PIN, FLASK_PIN, *OURS, CLAIMS_NONE)
OF_CLAIMS = (CLAIMS_NONE, CLAIMS_OURS)
IN_GO = (GO_IDLE, GO_PIN)

LIMIT = {"quota": {"M40": 100_000, "P100": 100_000, "A100": 100_000}}
"""What nobody reaches."""

TIGHT_LIMIT = {"quota": {"M40": 6}}
"""Room for 60 pods of the bench."""

STORED_OF_TIGHT = 48
"""Of these 60 so many are stored at most, so that an exact count refuses none."""


class Arranged(NamedTuple):
    """An arrangement that is in effect: the processes to count, by name, and whether a controller settles ledgers.

    ``claims``: of it ResourceClaims are created, no pods. ``most``: so many pods of a namespace are stored at a time,
    and then the oldest is deleted for each new one; None if none are deleted.
    """

    processes: Mapping[str, Sequence[int]]
    settles: bool
    claims: bool = False
    most: int | None = None


def namespaces(name: str, spread: int) -> list[str]:
    """The first so many of the arrangement's namespaces."""
    return [f"{name}-{number}" for number in range(spread)]


def prepare(plane: Plane, names: Sequence[str], most: int) -> None:
    """Create so many namespaces of each arrangement, with what lasts in them: the quota that each is held to."""
    limits = {name: TIGHT_LIMIT if name in TIGHT else LIMIT for name in names if name in OURS}
    quota = {namespace: limit for name, limit in limits.items() for namespace in namespaces(name, most)}
    write_quota(plane.cluster, quota)
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
    """A ResourceQuota that nothing fills, in effect; its controller, which would say so in its status, does not run."""
    hard = {"requests.tencent.com/vcuda-core": "1000000000"}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    metadata = {"name": "cores"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}
    plane.cluster.rest.send("POST", path, quota).ok()
    status = {"hard": hard, "used": dict.fromkeys(hard, "0")}
    plane.cluster.rest.merge_patch(f"{path}/cores/status", {"status": status})


@contextmanager
def arranged(plane: Plane, name: str, program: Path | None) -> Iterator[Arranged]:
    """`with` this, pods in the arrangement's namespaces are admitted by it. ``program`` is the webhook in Go."""
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
    """What serves the arrangement's webhooks, to be started; nothing where it has none."""
    if name in IN_GO:
        assert program
        return [go.serving(program, plane.certificates, pins=name == GO_PIN)]
    if name == FLASK_PIN:
        return [servers.pinning(plane.certificates)]
    [shared] = free_ports(1)
    return [servers.ours(plane.certificates, plane.our_service(), shared) for _ in range(OURS.get(name, 0))]


def hooks(plane: Plane, name: str, running: Sequence[Server]) -> Webhooks:
    """What the arrangement registers."""
    if not running:
        return {MUTATING: (), VALIDATING: ()}
    register = installed if name in OURS else simple
    return register(running[0].called, plane.ca)
