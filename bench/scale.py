"""What a large cluster costs: 50,000 stored pods, of which 5,000 ask for vcuda, in 50 limited namespaces.

``python -m bench.scale``. Nothing is asserted; the figures, beside their targets, are for a person to read.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from bench import cpu, load, servers
from bench.hooks import MUTATING, VALIDATING, installed
from bench.plane import (
    ENFORCED,
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
from vcuda.cli import aligned
from vcuda.quota.model import Charge

NAMESPACES, GPU_PODS, PODS = 50, 5_000, 50_000
CONNECTIONS, BURST_SECONDS = 16, 10.0
SYNCED_SECONDS = 300.0


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


def main() -> None:
    """Print the table."""
    names = [f"team-{number}" for number in range(NAMESPACES)]
    with running_plane() as plane:
        write_quota(plane.cluster, {name: {"quota": {"M40": 100_000}} for name in names})
        create_nodes(plane.cluster, ("M40",), 10)
        for name in names:
            plane.cluster.create_namespace(name, ENFORCED)
        with servers.alone(plane.certificates, plane.our_service()) as webhook:
            await_ready(plane, webhook.url)
            before = cost(webhook.worker)
            stored = timed(store, plane, names)
            with running_controller(plane) as controller:
                settled = timed(await_settled, plane, names)
                synced = cost(controller.process.pid)
                at_sync = float(controller.await_log("synced")["cpu_seconds"])
                largest, rate = burst(plane, names[0], webhook.url)
                after = cost(webhook.worker)
    rows = (
        ("what", "figure", "target"),
        (f"{PODS} pods stored", f"{stored:.0f} s", ""),
        ("controller: CPU until every list is complete", f"{at_sync:.1f} s", "under 30 s"),
        (f"controller: CPU until {NAMESPACES} ledgers are settled", f"{synced.cpu:.1f} s", ""),
        (f"controller: until {NAMESPACES} ledgers are settled", f"{settled:.0f} s", ""),
        ("controller: most memory by then", f"{synced.peak:.0f} MiB", "under 250 MiB"),
        ("webhook: memory without pods", f"{before.memory:.0f} MiB", ""),
        (f"webhook: memory with {PODS} pods and after a burst", f"{after.memory:.0f} MiB", "no pod cache"),
        (f"ledger: largest in a burst of {rate:.0f} pods/s", f"{largest} bytes", "under 20000 bytes"),
    )
    print("\n".join(aligned(rows)))


def timed(work: Callable[[Plane, list[str]], None], plane: Plane, names: list[str]) -> float:
    """Do the work; return the seconds it took."""
    started = time.monotonic()
    work(plane, names)
    return time.monotonic() - started


def store(plane: Plane, names: list[str]) -> None:
    """Create the pods: nothing is registered yet, so those for vcuda are held to their model as /mutate would."""
    gpu, plain = gpu_pod(), gpu_pod()
    gpu["spec"]["affinity"] = held_to("M40")
    del plain["spec"]["containers"][0]["resources"]

    def requests() -> Iterator[bytes]:
        for number in range(PODS):
            pod = gpu if number % (PODS // GPU_PODS) == 0 else plain
            # Named by us: of so many that the API server names, some would meet.
            named = {**pod, "metadata": {"name": f"stored-{number}"}}
            yield request(plane, names[number // (PODS // NAMESPACES)], named)

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


def await_settled(plane: Plane, names: list[str]) -> None:
    """Return once every ledger counts all the pods of its namespace."""
    cores = GPU_PODS // NAMESPACES * 10
    deadline = time.monotonic() + SYNCED_SECONDS
    for name in names:
        while plane.ledger(name)[0].committed.get("M40", Charge()).cores != cores:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} not settled after {SYNCED_SECONDS:g} s: {plane.ledger(name)}")
            time.sleep(0.2)


def burst(plane: Plane, namespace: str, url: str) -> tuple[int, float]:
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
            seconds=BURST_SECONDS,
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


if __name__ == "__main__":
    main()
