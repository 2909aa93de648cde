"""Measures what a large cluster costs the controller and the webhook: by default 50,000 stored pods in 50 namespaces.

Of the pods, 5,000 request GPUs. There are also 50,000 allocated ResourceClaims, and 5,000 ResourceSlices of eight
devices. The benchmark prints the measured values next to target values, and checks nothing.
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
from bench.failover import await_standby
from bench.hooks import MUTATING, VALIDATING, installed
from bench.measuring import STEADY_SECONDS, committed
from bench.plane import Plane, await_ready, create_nodes, gpu_pod, running_controller, running_plane, write_quota
from bench.rounds import NO_CLAIMS, say
from tests.builders import held_to
from tests.e2e.cluster import Json
from tests.e2e.dra import PRODUCTS, claims_path, served
from vcuda.cli import FiniteRange, aligned

T = TypeVar("T")

OF_PODS = 10
"""One of this many stored pods requests a GPU."""

CONNECTIONS, BURST_SECONDS = 16, 10.0
SYNCED_SECONDS = 300.0
ENDS, EVENTS, EVENT_SECONDS, POLL_SECONDS = 5, 1_000, 10.0, 0.02


class Sizes(NamedTuple):
    """The numbers of objects to store.

    ``events``: how many claims are deleted, and how many ResourceSlices are changed, one after the other.
    """

    namespaces: int
    pods: int
    claims: int
    slices: int
    events: int = EVENTS

    @property
    def names(self) -> list[str]:
        """The names of the namespaces with the stored objects."""
        return [f"team-{number}" for number in range(self.namespaces)]

    def home(self, claim: int) -> str:
        """Return the namespace of the claim with this number."""
        return f"team-{claim % self.namespaces}"


class Row(NamedTuple):
    """One figure of the output.

    ``key``: the name of the figure in the JSON output.
    ``what``: the name of the figure in the table.
    ``target``: the limit that the value should meet, as text; empty if the figure has none.
    """

    key: str
    what: str
    value: float
    unit: str
    target: str = ""


class Cost(NamedTuple):
    """The resources that a process has used.

    ``cpu``: the CPU seconds.
    ``memory``: the MiB that are in use now.
    ``peak``: the most MiB that were in use.
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
@click.option("--pods", default=50_000, type=click.IntRange(0), help="Stored pods, of which one in ten requests a GPU.")
@click.option("--claims", default=50_000, type=click.IntRange(0), help="Stored, allocated ResourceClaims.")
@click.option("--slices", default=5_000, type=click.IntRange(1), help="ResourceSlices, each on its own node.")
@click.option("--events", default=EVENTS, type=click.IntRange(1), help="Deleted claims, and changed slices.")
@click.option("--seconds", default=BURST_SECONDS, type=FiniteRange(0.2, 60), help="Duration of a burst of creates.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Output format.")
def main(*, namespaces: int, pods: int, claims: int, slices: int, events: int, seconds: float, output: str) -> None:
    """Measure the controller and the webhook with 50,000 stored pods, 50,000 claims and 5,000 slices.

    Claims, slices and nodes are written into etcd. If the API server is older than Kubernetes 1.34, claims and slices
    are left out. The measurement takes about five minutes on two CPUs. Progress is printed on standard error.
    """
    rows = measure(Sizes(namespaces, pods, claims, slices, min(events, claims)), seconds)
    if output == "json":
        click.echo(json.dumps({row.key: round(row.value, 3) for row in rows}, indent=2))
    else:
        lines = ((row.what, f"{row.value:.2f} {row.unit}", row.target) for row in rows)
        click.echo("\n".join(aligned([("what", "figure", "target"), *lines])))


def measure(sizes: Sizes, seconds: float) -> list[Row]:
    """Store all objects of the benchmark, and return the measured values as table rows."""
    with running_plane() as plane:
        if not served(plane.cluster):
            say(NO_CLAIMS)
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
            say("All objects are stored. Starting the controller")
            started = time.monotonic()
            with running_controller(plane) as controller:
                await_recounted(plane, sizes)
                recounted, synced = time.monotonic() - started, cost(controller.process.pid)
                log = controller.await_log("every watch has received its first list")
                rows = [
                    Row("stored_seconds", "until all objects are stored", stored, "s"),
                    Row(
                        "synced_cpu_seconds",
                        "controller: CPU until all objects are listed",
                        float(log["cpu_seconds"]),
                        "s",
                        "under 30 s",
                    ),
                    Row("recounted_cpu_seconds", "controller: CPU until all ledgers are recounted", synced.cpu, "s"),
                    Row("recounted_seconds", "controller: until all ledgers are recounted", recounted, "s"),
                    Row("controller_mib", "controller: memory when all are recounted", synced.memory, "MiB"),
                    Row(
                        "controller_peak_mib", "controller: peak memory until then", synced.peak, "MiB", "under 250 MiB"
                    ),
                ]
                say("Starting a standby")
                with running_controller(plane) as standby:
                    await_standby(standby)
                    listed, begun = cost(standby.process.pid), cost(controller.process.pid)
                    say("Measuring creates, deletions and events")
                    largest, rate = burst(plane, sizes.names[0], webhook.url, seconds)
                    rows += [*ends(plane, sizes), *events(plane, sizes, controller.process.pid, webhook.worker)]
                    after, last = cost(webhook.worker), cost(controller.process.pid)
                    waited = cost(standby.process.pid)
    return [
        *rows,
        Row("controller_end_mib", "controller: memory at the end", last.memory, "MiB"),
        Row("standby_mib", "standby: memory at the end", waited.memory, "MiB", "under 250 MiB"),
        Row("leader_cpu_seconds", "controller: CPU for these creates, deletions and events", last.cpu - begun.cpu, "s"),
        Row("standby_cpu_seconds", "standby: CPU for the same events", waited.cpu - listed.cpu, "s"),
        Row("webhook_idle_mib", "webhook: memory before anything was stored", before.memory, "MiB"),
        Row("webhook_mib", "webhook: memory at the end", after.memory, "MiB", "no pods, no claims"),
        Row("burst_pods_per_second", "creates of pods in a burst", rate, "/s"),
        Row("largest_ledger_bytes", "ledger: maximum size in the burst", largest, "bytes", "under 20000 bytes"),
    ]


def timed(work: Callable[[], object]) -> float:
    """Run ``work``, and return the seconds that it took."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def store(plane: Plane, sizes: Sizes) -> None:
    """Store the objects of the benchmark: the slices with their nodes and classes, the claims, and the pods."""
    if sizes.claims:
        say(f"Storing {sizes.slices} nodes and slices, and {sizes.claims} claims")
        seed.serve_classes(plane)
        seed.write(plane, map(seed.node, range(sizes.slices)))
        seed.write(plane, map(seed.resource_slice, range(sizes.slices)))
        claims = (seed.claim(number, sizes.home(number), sizes.slices) for number in range(sizes.claims))
        seed.write(plane, claims)
    say(f"Storing {sizes.pods} pods")
    store_pods(plane, sizes)


def store_pods(plane: Plane, sizes: Sizes) -> None:
    """Create the pods of the benchmark.

    The webhook is not registered yet. So the pods that request GPUs already have the node affinity by which /mutate
    pins a pod to a GPU model.
    """
    gpu, plain = gpu_pod(), gpu_pod()
    gpu["spec"]["affinity"] = held_to("M40")
    del plain["spec"]["containers"][0]["resources"]

    def requests() -> Iterator[bytes]:
        for number in range(sizes.pods):
            pod = gpu if number % OF_PODS == 0 else plain
            # The pods get fixed names, because among so many generated names of the API server some would be equal.
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
    url = f"{plane.cluster.server}/api/v1/namespaces/{namespace}/pods"
    return load.post(url, json.dumps(pod).encode(), {"Authorization": plane.authorization})


def await_recounted(plane: Plane, sizes: Sizes) -> None:
    """Wait until the ledger of every namespace counts all stored pods and claims of this namespace."""
    wanted = dict.fromkeys(sizes.names, 0)
    for number in range(0, sizes.pods, OF_PODS):
        wanted[sizes.names[number // OF_PODS % sizes.namespaces]] += 10
    for number in range(sizes.claims):
        wanted[sizes.home(number)] += seed.Offered.by(number % sizes.slices).cores
    for name, cores in wanted.items():
        await_count(plane, name, cores, 0.2)


def counted(plane: Plane, namespace: str) -> int:
    return committed(plane.ledger(namespace)[0])


def await_count(plane: Plane, namespace: str, cores: int, poll: float = POLL_SECONDS) -> None:
    """Wait until the ledger of the namespace counts exactly ``cores`` cores. Raises TimeoutError after 300 s."""
    deadline = time.monotonic() + SYNCED_SECONDS
    while counted(plane, namespace) != cores:
        if time.monotonic() > deadline:
            ledger = plane.ledger(namespace)[0]
            raise TimeoutError(
                f"the ledger of {namespace} does not count {cores} cores in {SYNCED_SECONDS:g} s: {ledger}"
            )
        time.sleep(poll)


def ends(plane: Plane, sizes: Sizes) -> Iterator[Row]:
    """Yield two rows: the median time from a deletion to the release of the charge, for pods and for claims."""
    homes = sizes.names[1:][:ENDS]
    pods = {name: f"/api/v1/namespaces/{name}/pods/stored-{number * OF_PODS}" for number, name in enumerate(homes, 1)}
    claims = {name: f"{claims_path(name)}/claim-{number}" for number, name in enumerate(homes, 1)}
    if homes and sizes.pods > ENDS * OF_PODS:
        taken = [after_end(plane, name, path, 10) for name, path in pods.items()]
        yield Row("pod_end_seconds", "from a pod's deletion to its release", statistics.median(taken), "s", "under 2 s")
    if homes and sizes.claims > ENDS:
        for name, path in claims.items():
            end_user(plane, name, path)
        cores = [seed.Offered.by(number % sizes.slices).cores for number in range(1, len(homes) + 1)]
        taken = [after_end(plane, name, path, each) for (name, path), each in zip(claims.items(), cores, strict=True)]
        yield Row(
            "claim_end_seconds", "from a claim's deletion to its release", statistics.median(taken), "s", "under 2 s"
        )


def end_user(plane: Plane, namespace: str, claim: str) -> None:
    """Create a pod that uses the claim at the path ``claim`` and has ended."""
    # The charge of a deleted claim whose user is unknown would stay for the longest time that the user may run.
    rest, name = plane.cluster.rest, claim.rsplit("/", 1)[1]
    container = {"name": "main", "image": "cuda", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    pods = f"/api/v1/namespaces/{namespace}/pods"
    uid = rest.send("POST", pods, pod).ok()["metadata"]["uid"]
    rest.merge_patch(f"{pods}/{name}/status", {"status": {"phase": "Succeeded"}})
    rest.merge_patch(f"{claim}/status", {"status": {"reservedFor": [{"resource": "pods", "name": name, "uid": uid}]}})


def after_end(plane: Plane, namespace: str, path: str, cores: int) -> float:
    """Delete an object that is charged ``cores`` cores. Return the seconds until the ledger releases this charge."""
    before = counted(plane, namespace)
    plane.cluster.rest.send("DELETE", path, {"gracePeriodSeconds": 0}).ok()
    return timed(lambda: await_count(plane, namespace, before - cores))


def events(plane: Plane, sizes: Sizes, controller: int, webhook: int) -> Iterator[Row]:
    """Yield rows: the controller's CPU per deleted claim, and the CPU of controller and webhook per changed slice."""
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
    """Call ``work`` for each item at even intervals. Return each process's CPU milliseconds per item."""
    before = [cpu.seconds(pid) for pid in pids]
    started = time.monotonic()
    for number, item in enumerate(items, 1):
        work(item)
        time.sleep(max(0.0, started + EVENT_SECONDS * number / len(items) - time.monotonic()))
    time.sleep(STEADY_SECONDS)
    return [(cpu.seconds(pid) - one) * 1000 / len(items) for pid, one in zip(pids, before, strict=True)]


def burst(plane: Plane, namespace: str, url: str, seconds: float) -> tuple[int, float]:
    """Create pods in one namespace as fast as possible, with the webhook registered.

    Return the maximum size of the ledger in bytes, and the rate of created pods per second.
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
    """Yield a list. 20 times a second, a thread appends the size of the namespace's ledger in bytes to it."""
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
