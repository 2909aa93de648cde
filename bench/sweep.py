"""Measures the CPU time in which the node agent deletes the directories of 1,000 deleted pods, among 10,000 in all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.cpu import timed
from tests.integration.node.disk import GRACE, Agent, Disk, uid
from vcuda.cli import aligned

DIRECTORIES, LIVE = 10_000, 9_000
ROUNDS = 5


def rounds(disk: Disk) -> dict[str, float]:
    """Return the CPU seconds of two successive sweeps, which together delete the directories of 1,000 deleted pods."""
    for number in range(LIVE, DIRECTORIES):
        disk.make(uid(number))
    agent = Agent(disk)
    first = timed(agent.sweep)
    disk.clocks.advance(2 * GRACE)
    deletes = timed(agent.sweep)
    if len(disk.names()) != LIVE:
        raise RuntimeError("the sweeps did not delete the directories of all deleted pods")
    return {"finds 1,000 directories of deleted pods": first, "deletes these directories": deletes}


def main() -> None:
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
