"""Measures one arrangement (a way to admit pods): creates pods, waits for the work that they cause, and deletes them.

The CPU of the API server, of etcd, and of the arrangement's processes is measured. The arrangement's processes are the
webhooks with their workers, and vcuda quota's controller if its webhook runs. This process, which creates the load, is
not measured.

After the load, the controller counts the new pods into the ledgers and publishes the usage. That work is part of the
cost of the pods. So the measurement ends when the ledgers count every pod, but at least `STEADY_SECONDS` after the
load. Every arrangement waits for this time, so all figures include the idle work of the API server. If a round stores
fewer pods, the idle work is a larger part of the figure per pod. The deletion of the pods is not measured.

Before the load, dry runs make the API server open its connections to the webhooks. Then the measurement waits until the
work of earlier rounds has ended.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

from bench import cpu, load, seed
from bench.arrangements import Arranged
from bench.figures import Figures, figures_of
from bench.plane import GPU_POD, LEDGER_NAMESPACE, Plane, gpu_pod
from tests.e2e.cluster import Json
from tests.e2e.dra import claim as claim_of, claims_path, request
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.text import read_ledger
from vcuda.quota.model import total

CONNECTIONS = 16
WARM_UP_SECONDS = 0.3
STEADY_SECONDS = 1.5
"""Within this many seconds, the controller counts a new pod in the ledger of its namespace, and publishes the usage."""

PATIENCE = 60.0
"""The maximum number of seconds to wait until the ledgers count all created pods, or until all charges are released."""

QUIET_SECONDS, QUIET_SHARE, QUIET_WITHIN = 0.25, 0.2, 10.0
"""A measurement starts when the processes use less than `QUIET_SHARE` of a CPU for `QUIET_SECONDS` seconds. After
`QUIET_WITHIN` seconds it starts in any case."""

PAUSE_SECONDS = 0.05
"""Seconds that a connection waits after a rejected create."""

CORES = int(GPU_POD["tencent.com/vcuda-core"])


def measure(plane: Plane, arranged: Arranged, namespaces: Sequence[str], seconds: float) -> Figures:
    """Create pods in these namespaces for ``seconds`` seconds, delete all of them, and return the figures.

    Raises TimeoutError if the ledgers do not count all pods in time, or do not release all charges.
    """
    with load.connected(plane.cluster.server, plane.cluster.ca_file, CONNECTIONS) as connections:
        put(connections, plane, namespaces, WARM_UP_SECONDS, "?dryRun=All", claims=arranged.claims)
        await_quiet(arranged.processes)
        before = cpu.by_name(arranged.processes)
        if arranged.most is None:
            result = put(connections, plane, namespaces, seconds, claims=arranged.claims)
        else:
            result = put_ending(connections, plane, namespaces, seconds, arranged.most)
    done = time.monotonic() + STEADY_SECONDS
    if arranged.recounts:
        cores = (result.wanted - result.deleted) * CORES
        await_ledgers(plane, namespaces, lambda ledgers: recounted(ledgers) and sum(map(committed, ledgers)) == cores)
    time.sleep(max(0.0, done - time.monotonic()))
    after = cpu.by_name(arranged.processes)
    clear(plane, namespaces, claims=arranged.claims)
    if arranged.recounts:
        await_ledgers(plane, namespaces, lambda ledgers: recounted(ledgers) and not any(map(committed, ledgers)))
    return figures_of(result, {name: after[name] - before[name] for name in after})


def put(
    connections: Sequence[ssl.SSLSocket],
    plane: Plane,
    namespaces: Sequence[str],
    seconds: float,
    query: str = "",
    *,
    claims: bool = False,
) -> load.Result:
    """Create pods, or claims, for ``seconds`` seconds. The connections are spread evenly over the namespaces.

    If there are more namespaces than connections, each connection uses several namespaces in turn.
    """
    body = json.dumps(gpu_claim() if claims else gpu_pod()).encode()

    def post(namespace: str) -> bytes:
        url = f"{plane.cluster.server}{collection(namespace, claims=claims)}{query}"
        return load.post(url, body, {"Authorization": plane.authorization})

    each = [post(namespace) for namespace in namespaces]
    requests = [each[number % len(each) :: len(connections)] for number in range(len(connections))]
    return load.run_over(connections, requests, seconds=seconds, wanted=HTTPStatus.CREATED)


def put_ending(
    connections: Sequence[ssl.SSLSocket], plane: Plane, namespaces: Sequence[str], seconds: float, most: int
) -> load.Result:
    """Create pods for ``seconds`` seconds. If a namespace has ``most`` stored pods, each new pod replaces the oldest.

    The caller must not pass more namespaces than connections.
    """
    headers = {"Authorization": plane.authorization}
    body, now = json.dumps(gpu_pod()).encode(), json.dumps({"gracePeriodSeconds": 0}).encode()

    def life(number: int) -> load.Life:
        place = number % len(namespaces)
        path = f"{plane.cluster.server}{collection(namespaces[place], claims=False)}"
        sharing = len(range(place, len(connections), len(namespaces)))
        return load.Life(
            load.post(path, body, headers),
            lambda name: load.post(f"{path}/{name}", now, headers, "DELETE"),
            most // sharing,
            PAUSE_SECONDS,
        )

    return load.run_ending(connections, [life(number) for number in range(len(connections))], seconds=seconds)


def await_quiet(processes: Mapping[str, Sequence[int]]) -> None:
    """Wait until these processes are nearly idle. If they are busy for too long, print a warning and return."""
    deadline = time.monotonic() + QUIET_WITHIN
    while (share := shares(processes)) > QUIET_SHARE:
        if time.monotonic() > deadline:
            busy = f"{', '.join(processes)} still use {share:.0%} of a CPU after {QUIET_WITHIN:g} s"
            print(f"Warning: {busy}. The measurement starts nevertheless.", file=sys.stderr)
            return


def shares(processes: Mapping[str, Sequence[int]]) -> float:
    """Watch these processes for a short time. Return the CPU that all of them use, as a fraction of one CPU."""
    before = sum(cpu.by_name(processes).values())
    time.sleep(QUIET_SECONDS)
    return (sum(cpu.by_name(processes).values()) - before) / QUIET_SECONDS


def await_ledgers(plane: Plane, namespaces: Sequence[str], wanted: Callable[[list[Ledger]], bool]) -> None:
    """Watch the ledgers of these namespaces until ``wanted`` is true. Polling would cost the API server more CPU."""
    path = f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps"
    owners = f"quota.vcuda.io/ledger-of in ({','.join(namespaces)})"
    plane.cluster.await_collection(
        path, lambda found: wanted([ledger_in(one) for one in found]), PATIENCE, labelSelector=owners
    )


def ledger_in(config_map: Json) -> Ledger:
    return read_ledger(config_map["data"]["ledger"])


def committed(ledger: Ledger) -> int:
    """Return how many cores the ledger counts for stored pods and claims, added up over all GPU models."""
    return int(total((*ledger.committed.values(), *ledger.claimed.values())).cores)


def recounted(ledgers: Sequence[Ledger]) -> bool:
    """Return True if no ledger has a pending charge, which is for an admitted object that is not stored yet."""
    return not any(ledger.pending for ledger in ledgers)


def collection(namespace: str, *, claims: bool) -> str:
    """Return the API path of all claims, or of all pods, in a namespace."""
    return claims_path(namespace) if claims else f"/api/v1/namespaces/{namespace}/pods"


def gpu_claim() -> Json:
    """Return a ResourceClaim with the same GPU request as the benchmark's pods. The API server generates its name."""
    asked = seed.Offered.by(seed.SHARED)
    share: Json = {"capacity": {"requests": {"cores": str(CORES), "memory": "1Gi"}}}
    manifest = claim_of("", "", request(asked.device_class, **share))
    return {**manifest, "metadata": {"generateName": "bench-"}}


def clear(plane: Plane, namespaces: Sequence[str], *, claims: bool) -> None:
    """Delete all pods, or all claims, of these namespaces."""

    def delete(namespace: str) -> None:
        plane.cluster.rest.send("DELETE", collection(namespace, claims=claims), {"gracePeriodSeconds": 0}).ok()

    with ThreadPoolExecutor(len(namespaces)) as threads:
        list(threads.map(delete, namespaces))
