"""Measures the CPU time to find stale GPU allocations of 20,000 pods, and the controller's memory for these pods.

``python -m bench.stale`` prints the measured values next to target values, and checks nothing.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec

from bench.cpu import median
from examples.allocations import allocated_pod
from tests.builders import LABELS
from vcuda.allocations.stale import find_stale, first_stale
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.cli import aligned
from vcuda.k8s_types import Pod
from vcuda.requests.schemes import SCHEMES

PODS, NODES, ROUNDS = 20_000, 1_000, 7
START, TIMEOUT = 1_700_000_000.0, 300.0
NOW = START + TIMEOUT / 2
"""The time of the search for stale allocations. At this time, half of the unbound pods have a stale allocation."""


def main() -> None:
    nodes = {f"gpu-{number}" for number in range(NODES)}
    raw = [*bodies()]
    tracemalloc.start()
    pods = [*kept(raw)]
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    def decide() -> int:
        return sum(1 for pod in pods if find_stale(pod, nodes.__contains__, NOW, TIMEOUT))

    def look() -> int:
        return sum(1 for pod in pods if first_stale(pod, nodes.__contains__, NOW, TIMEOUT) is not None)

    rows = (
        ("what", "figure", "target"),
        (f"find the stale allocations of {PODS} pods: {decide()}", f"{median(decide, ROUNDS):.3f} s", "under 0.5 s"),
        (f"find when allocations become stale: {look()}", f"{median(look, ROUNDS):.3f} s", "under 0.5 s"),
        (f"memory for {PODS} pods with their allocations", f"{memory / 2**20:.0f} MiB", ""),
    )
    print("\n".join(aligned(rows)))


def bodies() -> Iterator[bytes]:
    """Yield pods in JSON. Of every ten pods, eight run, one has ended, and one was never bound to a node."""
    for number in range(PODS):
        scheme, node = SCHEMES[number % len(SCHEMES)], f"gpu-{number % NODES}"
        state: dict[int, dict[str, Any]] = {8: {"status": "Succeeded", "bound": node}, 9: {"status": "Pending"}}
        fields = state.get(number // len(SCHEMES) % 10, {"status": "Running", "bound": node, "phase": "done"})
        at = START - number % int(TIMEOUT)
        named = {**fields, "name": f"train-{number}", "uid": f"uid-{number}"}
        yield msgspec.json.encode(allocated_pod(scheme, at, node=node, **named))


def kept(raw: list[bytes]) -> Iterator[StoredPod]:
    """Yield the part of each pod that the controller keeps in memory."""
    decoder = msgspec.json.Decoder(Pod)
    for body in raw:
        pod = read_stored(decoder.decode(body), LABELS, whole_keys=True)
        if pod:
            yield pod


if __name__ == "__main__":
    main()
