"""CPU time of the node agent's sweeps over 10,000 directories, of which 9,000 belong to live pods."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.node.disk import GRACE, RETENTION, Agent, Disk, uid
from vcuda.cli import aligned

DIRECTORIES, LIVE = 10_000, 9_000
ROUNDS = 5


def cpu_seconds(sweep: Callable[[], object]) -> float:
    """Return the CPU seconds, user and system, that one sweep of the node agent takes."""
    began = time.process_time()
    sweep()
    return time.process_time() - began


def rounds(disk: Disk) -> dict[str, float]:
    """Return the CPU seconds of each sweep of the node agent.

    The first of these sweeps finds a thousand deleted pods, and the last one has removed all their directories.
    """
    for number in range(LIVE, DIRECTORIES):
        disk.make(uid(number))
    agent = Agent(disk)
    first = cpu_seconds(agent.sweep)
    disk.clocks.advance(2 * GRACE)
    moves = cpu_seconds(agent.sweep)
    rest = cpu_seconds(agent.sweep)
    disk.clocks.advance(RETENTION)
    deletes = cpu_seconds(agent.sweep)
    if len(disk.names()) != LIVE or disk.trash():
        raise RuntimeError("the sweeps did not do their work")
    return {
        "finds the 1,000 first": first,
        "moves the 1,000 to the trash": moves,
        "leaves the 1,000 in the trash": rest,
        "deletes the 1,000": deletes,
    }


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="vm-directories-") as base:
        disk = Disk(Path(base))
        disk.furnish()
        for number in range(LIVE):
            disk.make(uid(number))
        disk.pods.uids = {uid(number) for number in range(LIVE)}
        measured = [rounds(disk) for _ in range(ROUNDS)]
    rows = [(name, f"{max(each[name] for each in measured):.3f}") for name in measured[0]]
    print("\n".join(aligned([(f"sweep over {DIRECTORIES:,}, {LIVE:,} live", f"CPU s, most of {ROUNDS}"), *rows])))


if __name__ == "__main__":
    main()
