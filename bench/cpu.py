"""The CPU time of other processes and of their children, from /proc, and the CPU time of a function in this process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def seconds_of(stat: str) -> float:
    """Return the CPU seconds, user and system, in the text of /proc/PID/stat.

    The CPU time of children that have ended is included, for example of a worker that was replaced.
    """
    # The text has the program's name in parentheses. The name itself may contain spaces and parentheses, so the fields
    # are counted from the last closing parenthesis.
    fields = stat.rpartition(")")[2].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return (user + system + children_user + children_system) / TICKS_A_SECOND


def seconds(pid: int) -> float:
    """Return the CPU seconds of a process. Raises FileNotFoundError if the process does not exist."""
    return seconds_of(Path(f"/proc/{pid}/stat").read_text())


def family(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants. Raises FileNotFoundError if the process has ended."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def by_name(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return for each program the CPU seconds that its processes and their descendants have used so far."""
    return {name: sum(seconds(one) for pid in pids for one in family(pid)) for name, pids in processes.items()}


def timed(work: Callable[[], object], repeats: int = 1) -> float:
    """Run ``work`` ``repeats`` times, and return the CPU seconds of this process for all runs together."""
    started = time.process_time()
    for _ in range(repeats):
        work()
    return time.process_time() - started


def median(work: Callable[[], object], rounds: int, repeats: int = 1) -> float:
    """Return the CPU seconds of one run of ``work``: the median of several rounds of ``repeats`` runs each."""
    return statistics.median(timed(work, repeats) for _ in range(rounds)) / repeats
