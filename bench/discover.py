"""Measures the CPU time in which the controller finds the GPU models of 5,000 nodes.

The CPU time is measured in two cases: after the controller's leader has started, and while HAMi changes annotations of
all nodes.

``python -m bench discover`` prints the measured values next to a target value, and checks nothing.
"""

from __future__ import annotations

import msgspec

from bench.cpu import median
from examples import claims
from examples.discovery import A100, MODEL, REPORTED, features, hami, node
from vcuda.claims.devices import read_slice
from vcuda.cli import aligned
from vcuda.discovery.discovered import find_model
from vcuda.discovery.sources import published_cards
from vcuda.k8s_types import Node
from vcuda.placement.device_plugins import read_facts
from vcuda.placement.registers import read_registers
from vcuda.requests.resources import BUILT_IN

NODES, CARDS, ROUNDS, REPEATS = 5_000, 8, 7, 2_000
EVENTS_PER_SECOND = NODES * 2 / 30
"""Watch events about nodes, per second. HAMi's scheduler and device plugin each annotate every node every 30 s."""
LABELS = {f"feature.node.kubernetes.io/cpu-{number}": "true" for number in range(40)}


def main() -> None:
    product = A100.replace(" ", "-")
    manifest = node(hami(*[A100] * CARDS, handshake=REPORTED), features(product, str(CARDS)), labels=LABELS)
    read = msgspec.convert(manifest, Node)
    registers = read_registers(read.annotations, lambda *_: None)
    facts = read_facts(read, BUILT_IN, registers)
    slices = [
        read_slice(
            claims.slice_of(
                claims.NVIDIA, f"n{number}", *(claims.device(claims.A100, name=f"gpu-{card}") for card in range(CARDS))
            )
        )
        for number in range(NODES)
    ]
    event = median(lambda: read_facts(read, BUILT_IN, registers), ROUNDS, REPEATS)
    look = median(lambda: find_model(read.labels, MODEL, registers, facts), ROUNDS, REPEATS)
    index = median(lambda: published_cards(slices), ROUNDS)
    share = event * EVENTS_PER_SECOND
    rows = (
        ("what", "CPU", "target"),
        (f"{NODES} nodes with HAMi, {EVENTS_PER_SECOND:.0f} events a second", f"{share:.2%} of a core", "under 1 %"),
        ("read the fields of a node from one event", f"{event * 1e6:.1f} µs", ""),
        ("find the model of a changed node", f"{look * 1e6:.1f} µs", ""),
        (f"find the models of {NODES} nodes at the start", f"{look * NODES:.2f} s", ""),
        (f"group {NODES} ResourceSlices by node after a change", f"{index * 1e3:.0f} ms", ""),
    )
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
