"""What a large cluster costs: by default 50,000 stored pods, of which 5,000 ask for vcuda, in 50 limited namespaces.

Beside them 50,000 allocated ResourceClaims, and 5,000 ResourceSlices of eight devices. Nothing is asserted; the
figures, beside their targets, are for a person to read.
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
"""One pod of so many asks for vcuda."""

CONNECTIONS, BURST_SECONDS = 16, 10.0
SYNCED_SECONDS = 300.0
ENDS, EVENTS, EVENT_SECONDS, POLL_SECONDS = 5, 1_000, 10.0, 0.02


class Sizes(NamedTuple):
    """How much of what is stored; ``events``: so many claims go, one after the other, and so many slices change."""

    namespaces: int
    pods: int
    claims: int
    slices: int
    events: int = EVENTS

    @property
    def names(self) -> list[str]:
        """The namespaces."""
        return [f"team-{number}" for number in range(self.namespaces)]

    def home(self, claim: int) -> str:
        """The namespace of a claim."""
        return f"team-{claim % self.namespaces}"


class Row(NamedTuple):
    """One figure; the target is where there is one."""

    key: str
    what: str
    value: float
    unit: str
    target: str = ""


class Cost(NamedTuple):
    """What a process has used so far: CPU seconds, and MiB now and at most."""

    cpu: float
    memory: float
    peak: float


def cost(pid: int) -> Cost:
    """Read it from /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory, peak = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return Cost(cpu.seconds(pid), memory, peak)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--namespaces", default=50, type=click.IntRange(1), help="Limited namespaces.")
@click.option("--pods", default=50_000, type=click.IntRange(0), help="Stored pods; one of ten asks for vcuda.")
@click.option("--claims", default=50_000, type=click.IntRange(0), help="Stored, allocated ResourceClaims.")
@click.option("--slices", default=5_000, type=click.IntRange(1), help="ResourceSlices, each on a node of its own.")
@click.option("--events", default=EVENTS, type=click.IntRange(1), help="Claims that go, and slices that change.")
@click.option("--seconds", default=BURST_SECONDS, type=FiniteRange(0.2, 60), help="A burst of creates.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to print the figures.")
def main(*, namespaces: int, pods: int, claims: int, slices: int, events: int, seconds: float, output: str) -> None:
    """Measure the controller and the webhook beside 50,000 stored pods, 50,000 claims and 5,000 slices.

    Claims, slices and nodes are written into etcd; Kubernetes up to 1.33, which serves no claims, does without them.
    It takes about five minutes on two CPUs; progress goes to standard error.
    """
    rows = measure(Sizes(namespaces, pods, claims, slices, min(events, claims)), seconds)
    if output == "json":
        click.echo(json.dumps({row.key: round(row.value, 3) for row in rows}, indent=2))
    else:
        lines = ((row.what, f"{row.value:.2f} {row.unit}", row.target) for row in rows)
        click.echo("\n".join(aligned([("what", "figure", "target"), *lines])))


def say(line: str) -> None:
    """Tell a person how it goes."""
    click.echo(line, err=True)


def measure(sizes: Sizes, seconds: float) -> list[Row]:
    """Store it all, and return what that costs."""
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
                log = controller.await_log("synced")
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
    """Do the work; return the seconds it took."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def store(plane: Plane, sizes: Sizes) -> None:
    """Store the slices with their nodes and classes, the claims, and the pods."""
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
    """Create the pods: nothing is registered yet, so those for vcuda are held to their model as /mutate would."""
    gpu, plain = gpu_pod(), gpu_pod()
    gpu["spec"]["affinity"] = held_to("M40")
    del plain["spec"]["containers"][0]["resources"]

    def requests() -> Iterator[bytes]:
        for number in range(sizes.pods):
            pod = gpu if number % OF_PODS == 0 else plain
            # Named by us: of so many that the API server names, some would meet.
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
    """The creation of the pod, as it goes over the wire."""
    url = f"{plane.cluster.server}/api/v1/namespaces/{namespace}/pods"
    return load.post(url, json.dumps(pod).encode(), {"Authorization": plane.authorization})


def await_settled(plane: Plane, sizes: Sizes) -> None:
    """Return once every ledger counts all the pods and claims of its namespace."""
    wanted = dict.fromkeys(sizes.names, 0)
    for number in range(0, sizes.pods, OF_PODS):
        wanted[sizes.names[number // OF_PODS % sizes.namespaces]] += 10
    for number in range(sizes.claims):
        wanted[sizes.home(number)] += seed.Offered.by(number % sizes.slices).cores
    for name, cores in wanted.items():
        await_count(plane, name, cores, 0.2)


def counted(plane: Plane, namespace: str) -> int:
    """The cores of stored pods and claims in a ledger."""
    ledger = plane.ledger(namespace)[0]
    return sum(each.cores for each in (*ledger.committed.values(), *ledger.claimed.values()))


def await_count(plane: Plane, namespace: str, cores: int, poll: float = POLL_SECONDS) -> None:
    """Return once the ledger counts so many cores."""
    deadline = time.monotonic() + SYNCED_SECONDS
    while counted(plane, namespace) != cores:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{namespace} not settled after {SYNCED_SECONDS:g} s: {plane.ledger(namespace)}")
        time.sleep(poll)


def ends(plane: Plane, sizes: Sizes) -> Iterator[Row]:
    """How long after the end of a pod, and of a claim, its ledger counts it no more: medians."""
    homes = sizes.names[1:][:ENDS]
    pods = {name: f"/api/v1/namespaces/{name}/pods/stored-{number * OF_PODS}" for number, name in enumerate(homes, 1)}
    claims = {name: f"{claims_path(name)}/claim-{number}" for number, name in enumerate(homes, 1)}
    if homes and sizes.pods > ENDS * OF_PODS:
        taken = [after_end(plane, name, path, 10) for name, path in pods.items()]
        yield Row("pod_end_seconds", "a pod's end until its ledger says so", statistics.median(taken), "s", "under 2 s")
    if homes and sizes.claims > ENDS:
        cores = [seed.Offered.by(number % sizes.slices).cores for number in range(1, len(homes) + 1)]
        taken = [after_end(plane, name, path, each) for (name, path), each in zip(claims.items(), cores, strict=True)]
        yield Row(
            "claim_end_seconds", "a claim's end until its ledger says so", statistics.median(taken), "s", "under 2 s"
        )


def after_end(plane: Plane, namespace: str, path: str, cores: int) -> float:
    """Delete an object that takes so many cores; return the seconds until the ledger counts them no more."""
    before = counted(plane, namespace)
    plane.cluster.rest.send("DELETE", path, {"gracePeriodSeconds": 0}).ok()
    return timed(lambda: await_count(plane, namespace, before - cores))


def events(plane: Plane, sizes: Sizes, controller: int, webhook: int) -> Iterator[Row]:
    """The CPU that the end of a claim costs the controller, and the change of a slice both: spread over some time."""
    if not sizes.events:
        return
    last = range(sizes.claims - sizes.events, sizes.claims)
    keys = [f"resourceclaims/{sizes.home(number)}/claim-{number}" for number in last]
    taken = paced(lambda key: seed.remove(plane, [key]), keys, controller, webhook)
    yield Row("claim_event_ms", "controller: CPU a claim that goes", taken[0], "ms")
    slices = [number % sizes.slices for number in range(min(sizes.events, sizes.slices))]
    taken = paced(lambda number: seed.write(plane, [seed.resource_slice(number, 2)]), slices, controller, webhook)
    yield Row("slice_event_ms", "controller: CPU a slice that changes", taken[0], "ms")
    yield Row("webhook_slice_event_ms", "webhook: CPU a slice that changes", taken[1], "ms")


def paced(work: Callable[[T], None], items: Sequence[T], *pids: int) -> list[float]:
    """Work off the items over `EVENT_SECONDS`; return the CPU milliseconds that each item costs these processes."""
    before = [cpu.seconds(pid) for pid in pids]
    started = time.monotonic()
    for number, item in enumerate(items, 1):
        work(item)
        time.sleep(max(0.0, started + EVENT_SECONDS * number / len(items) - time.monotonic()))
    time.sleep(SETTLE_SECONDS)
    return [(cpu.seconds(pid) - one) * 1000 / len(items) for pid, one in zip(pids, before, strict=True)]


def burst(plane: Plane, namespace: str, url: str, seconds: float) -> tuple[int, float]:
    """Create pods in one namespace through the webhook; return the largest ledger seen, in bytes, and the pods/s."""
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
    """`with` this, the ledger's size is taken again and again."""
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
