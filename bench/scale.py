"""The cost of a large cluster. By default it has 50,000 stored pods in 50 limited namespaces; 5,000 of the pods request
vcuda.

There are also 50,000 allocated ResourceClaims, and 5,000 ResourceSlices of eight devices. The benchmark prints the
figures with their targets, and asserts nothing.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, TypeVar

import click

from bench import cpu, load, seed, servers
from bench.hooks import MUTATING, VALIDATING, installed
from bench.measuring import SETTLE_SECONDS
from bench.plane import (
    Plane,
    await_ready,
    create_nodes,
    gpu_pod,
    running_controller,
    running_plane,
    write_quota,
)
from tests.builders import held_to
from tests.e2e.cluster import Json
from tests.e2e.dra import PRODUCTS, claims_path, served
from vcuda.cli import FiniteRange, aligned

T = TypeVar("T")

OF_PODS = 10
"""One of every `OF_PODS` stored pods requests vcuda (a GPU)."""

CONNECTIONS, BURST_SECONDS = 16, 10.0
SYNCED_SECONDS = 300.0
ENDS, EVENTS, EVENT_SECONDS, POLL_SECONDS = 5, 1_000, 10.0, 0.02


class Sizes(NamedTuple):
    """The numbers of objects to store.

    ``events``: the number of claims that are deleted, and of ResourceSlices that are changed, one after the other.
    """

    namespaces: int
    pods: int
    claims: int
    slices: int
    events: int = EVENTS

    @property
    def names(self) -> list[str]:
        """Return the names of the namespaces that the benchmark fills."""
        return [f"team-{number}" for number in range(self.namespaces)]

    def home(self, claim: int) -> str:
        """Return the namespace of the claim with this number."""
        return f"team-{claim % self.namespaces}"


class Row(NamedTuple):
    """One figure of the output.

    ``key``: its name in the JSON output.
    ``what``: its name in the table.
    ``target``: the wanted value as a text; empty if the figure has no target.
    """

    key: str
    what: str
    value: float
    unit: str
    target: str = ""


class Cost(NamedTuple):
    """The resources that a process has used.

    ``cpu``: CPU seconds.
    ``memory``: MiB in use now.
    ``peak``: MiB that the process has used at most.
    """

    cpu: float
    memory: float
    peak: float


def cost(pid: int) -> Cost:
    """Read the CPU time and the memory of a process from /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Cost(cpu.seconds(pid), memory, peak)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--namespaces", default=50, type=click.IntRange(1), help="Limited namespaces.")
@click.option("--pods", default=50_000, type=click.IntRange(0), help="Stored pods; one of ten requests vcuda.")
@click.option("--claims", default=50_000, type=click.IntRange(0), help="Stored, allocated ResourceClaims.")
@click.option("--slices", default=5_000, type=click.IntRange(1), help="ResourceSlices, each on its own node.")
@click.option("--events", default=EVENTS, type=click.IntRange(1), help="Deleted claims, and changed slices.")
@click.option("--seconds", default=BURST_SECONDS, type=FiniteRange(0.2, 60), help="Duration of a burst of creates.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format.")
def main(*, namespaces: int, pods: int, claims: int, slices: int, events: int, seconds: float, output: str) -> None:
    """Measure the controller and the webhook with 50,000 stored pods, 50,000 claims and 5,000 slices.

    Claims, slices and nodes are written into etcd. Kubernetes up to 1.33 serves no claims, so claims and slices are
    left out there. The measurement takes about five minutes on two CPUs. Progress goes to standard error.
    """
    rows = measure(Sizes(namespaces, pods, claims, slices, min(events, claims)), seconds)
    if output == "json":
        click.echo(json.dumps({row.key: round(row.value, 3) for row in rows}, indent=2))
    else:
        lines = ((row.what, f"{row.value:.2f} {row.unit}", row.target) for row in rows)
        click.echo("\n".join(aligned([("what", "figure", "target"), *lines])))


def say(line: str) -> None:
    """Report progress to standard error."""
    click.echo(line, err=True)


def measure(sizes: Sizes, seconds: float) -> list[Row]:
    """Store all objects of the benchmark, and return the cost of the large cluster."""
    with running_plane() as plane:
        if not served(plane.cluster):
            say("no claims: resource.k8s.io/v1 is not served")
            sizes = sizes._replace(claims=0, slices=0, events=0)
        limits = {"quota": dict.fromkeys(("M40", *PRODUCTS), 100_000)}
        write_quota(plane.cluster, dict.fromkeys(sizes.names, limits))
        create_nodes(plane.cluster, ("M40",), 10)
        for name in sizes.names:
            plane.cluster.create_namespace(name)
        with servers.alone(plane.certificates, plane.our_service()) as webhook:
            await_ready(plane, webhook.url)
            before = cost(webhook.worker)
            stored = timed(lambda: store(plane, sizes))
            say("all is stored; starting the controller")
            started = time.monotonic()
            with running_controller(plane) as controller:
                await_settled(plane, sizes)
                settled, synced = time.monotonic() - started, cost(controller.process.pid)
                log = controller.await_log("every watch has received its first list")
                rows = [
                    Row("stored_seconds", "stored", stored, "s"),
                    Row(
                        "synced_cpu_seconds",
                        "controller: CPU until all is listed",
                        float(log["cpu_seconds"]),
                        "s",
                        "under 30 s",
                    ),
                    Row("settled_cpu_seconds", "controller: CPU until all ledgers are settled", synced.cpu, "s"),
                    Row("settled_seconds", "controller: until all ledgers are settled", settled, "s"),
                    Row("controller_mib", "controller: memory by then", synced.memory, "MiB"),
                    Row("controller_peak_mib", "controller: most memory by then", synced.peak, "MiB", "under 250 MiB"),
                ]
                say("creates, ends and events")
                largest, rate = burst(plane, sizes.names[0], webhook.url, seconds)
                rows += [*ends(plane, sizes), *events(plane, sizes, controller.process.pid, webhook.worker)]
                after, last = cost(webhook.worker), cost(controller.process.pid)
    return [
        *rows,
        Row("controller_end_mib", "controller: memory after that", last.memory, "MiB"),
        Row("webhook_idle_mib", "webhook: memory before anything was stored", before.memory, "MiB"),
        Row("webhook_mib", "webhook: memory at the end", after.memory, "MiB", "no pods, no claims"),
        Row("burst_pods_per_second", "creates of pods in a burst", rate, "/s"),
        Row("largest_ledger_bytes", "ledger: largest in that burst", largest, "bytes", "under 20000 bytes"),
    ]


def timed(work: Callable[[], object]) -> float:
    """Run ``work``, and return the seconds that it took."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def store(plane: Plane, sizes: Sizes) -> None:
    """Store the objects of the benchmark: the slices with their nodes and classes, the claims, and the pods."""
    if sizes.claims:
        say(f"storing {sizes.slices} nodes and slices, {sizes.claims} claims")
        seed.serve_classes(plane)
        seed.write(plane, map(seed.node, range(sizes.slices)))
        seed.write(plane, map(seed.resource_slice, range(sizes.slices)))
        claims = (seed.claim(number, sizes.home(number), sizes.slices) for number in range(sizes.claims))
        seed.write(plane, claims)
    say(f"storing {sizes.pods} pods")
    store_pods(plane, sizes)


def store_pods(plane: Plane, sizes: Sizes) -> None:
    """Create the pods of the benchmark.

    No webhook is registered yet, so the pods that request vcuda already have the pin (node affinity) of /mutate.
    """
    gpu, plain = gpu_pod(), gpu_pod()
    gpu["spec"]["affinity"] = held_to("M40")
    del plain["spec"]["containers"][0]["resources"]

    def requests() -> Iterator[bytes]:
        for number in range(sizes.pods):
            pod = gpu if number % OF_PODS == 0 else plain
            # The bench chooses the names of the pods. Among so many names that the API server generates, some would be
            # equal.
            named = {**pod, "metadata": {"name": f"stored-{number}"}}
            yield request(plane, sizes.names[number // OF_PODS % sizes.namespaces], named)

    load.send_each(
        plane.cluster.server,
        plane.cluster.ca_file,
        requests(),
        connections=CONNECTIONS,
        wanted=HTTPStatus.CREATED,
    )


def request(plane: Plane, namespace: str, pod: Json) -> bytes:
    """Return the bytes of the HTTP request that creates the pod."""
    url = f"{plane.cluster.server}/api/v1/namespaces/{namespace}/pods"
    return load.post(url, json.dumps(pod).encode(), {"Authorization": plane.authorization})


def await_settled(plane: Plane, sizes: Sizes) -> None:
    """Return when the ledger of every namespace counts all the stored pods and claims of the namespace."""
    wanted = dict.fromkeys(sizes.names, 0)
    for number in range(0, sizes.pods, OF_PODS):
        wanted[sizes.names[number // OF_PODS % sizes.namespaces]] += 10
    for number in range(sizes.claims):
        wanted[sizes.home(number)] += seed.Offered.by(number % sizes.slices).cores
    for name, cores in wanted.items():
        await_count(plane, name, cores, 0.2)


def counted(plane: Plane, namespace: str) -> int:
    """Return the cores that the ledger of the namespace counts for stored pods and claims."""
    ledger = plane.ledger(namespace)[0]
    return sum(each.cores for each in (*ledger.committed.values(), *ledger.claimed.values()))


def await_count(plane: Plane, namespace: str, cores: int, poll: float = POLL_SECONDS) -> None:
    """Return when the ledger of the namespace counts exactly ``cores`` cores."""
    deadline = time.monotonic() + SYNCED_SECONDS
    while counted(plane, namespace) != cores:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{namespace} not settled after {SYNCED_SECONDS:g} s: {plane.ledger(namespace)}")
        time.sleep(poll)


def ends(plane: Plane, sizes: Sizes) -> Iterator[Row]:
    """Yield two figures: the median seconds from the deletion of a pod until the ledger releases its charge, and the
    same for a claim.
    """
    homes = sizes.names[1:][:ENDS]
    pods = {name: f"/api/v1/namespaces/{name}/pods/stored-{number * OF_PODS}" for number, name in enumerate(homes, 1)}
    claims = {name: f"{claims_path(name)}/claim-{number}" for number, name in enumerate(homes, 1)}
    if homes and sizes.pods > ENDS * OF_PODS:
        taken = [after_end(plane, name, path, 10) for name, path in pods.items()]
        yield Row("pod_end_seconds", "from a pod's deletion to its release", statistics.median(taken), "s", "under 2 s")
    if homes and sizes.claims > ENDS:
        cores = [seed.Offered.by(number % sizes.slices).cores for number in range(1, len(homes) + 1)]
        taken = [after_end(plane, name, path, each) for (name, path), each in zip(claims.items(), cores, strict=True)]
        yield Row(
            "claim_end_seconds", "from a claim's deletion to its release", statistics.median(taken), "s", "under 2 s"
        )


def after_end(plane: Plane, namespace: str, path: str, cores: int) -> float:
    """Delete an object that uses ``cores`` cores. Return the seconds until the ledger no longer counts these cores."""
    before = counted(plane, namespace)
    plane.cluster.rest.send("DELETE", path, {"gracePeriodSeconds": 0}).ok()
    return timed(lambda: await_count(plane, namespace, before - cores))


def events(plane: Plane, sizes: Sizes, controller: int, webhook: int) -> Iterator[Row]:
    """Yield the CPU milliseconds for one deleted claim, and those for one changed ResourceSlice.

    A deleted claim is measured in the controller, and a changed slice in the controller and in the webhook.
    """
    if not sizes.events:
        return
    last = range(sizes.claims - sizes.events, sizes.claims)
    keys = [f"resourceclaims/{sizes.home(number)}/claim-{number}" for number in last]
    taken = paced(lambda key: seed.remove(plane, [key]), keys, controller, webhook)
    yield Row("claim_event_ms", "controller: CPU per deleted claim", taken[0], "ms")
    slices = [number % sizes.slices for number in range(min(sizes.events, sizes.slices))]
    taken = paced(lambda number: seed.write(plane, [seed.resource_slice(number, 2)]), slices, controller, webhook)
    yield Row("slice_event_ms", "controller: CPU per changed slice", taken[0], "ms")
    yield Row("webhook_slice_event_ms", "webhook: CPU per changed slice", taken[1], "ms")


def paced(work: Callable[[T], None], items: Sequence[T], *pids: int) -> list[float]:
    """Process the items at even intervals during `EVENT_SECONDS`. Return the CPU milliseconds per item for each
    process.
    """
    before = [cpu.seconds(pid) for pid in pids]
    started = time.monotonic()
    for number, item in enumerate(items, 1):
        work(item)
        time.sleep(max(0.0, started + EVENT_SECONDS * number / len(items) - time.monotonic()))
    time.sleep(SETTLE_SECONDS)
    return [(cpu.seconds(pid) - one) * 1000 / len(items) for pid, one in zip(pids, before, strict=True)]


def burst(plane: Plane, namespace: str, url: str, seconds: float) -> tuple[int, float]:
    """Create pods quickly in one namespace through the webhook.

    Return the maximum size of the ledger in bytes, and the pods per second.
    """
    hooks = installed(url, plane.ca)
    creation = request(plane, namespace, gpu_pod())
    with (
        plane.cluster.register_webhooks(mutating=hooks[MUTATING], validating=hooks[VALIDATING]),
        largest_ledger(plane, namespace) as sizes,
    ):
        result = load.run(
            plane.cluster.server,
            plane.cluster.ca_file,
            [creation] * CONNECTIONS,
            seconds=seconds,
            wanted=HTTPStatus.CREATED,
        )
    return max(sizes), result.rate


@contextmanager
def largest_ledger(plane: Plane, namespace: str) -> Iterator[list[int]]:
    """Yield a list, to which a thread repeatedly appends the ledger's size in bytes during the ``with`` statement."""
    sizes: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.05):
            sizes.append(plane.ledger(namespace)[1])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()
