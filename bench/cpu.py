"""The CPU time of processes and of their children, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def seconds_of(stat: str) -> float:
    """Return the CPU seconds, user and system, in a line of /proc/PID/stat.

    The time of children that have ended is included, for example of a worker that was replaced.
    """
    # In /proc/PID/stat, the program's name is in parentheses, and the name itself may contain spaces and parentheses.
    # So the fields are counted from the last closing parenthesis.
    fields = stat.rpartition(")")[2].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return (user + system + children_user + children_system) / TICKS_A_SECOND


def seconds(pid: int) -> float:
    """Return the CPU seconds of this process. Raises FileNotFoundError if the process does not exist."""
    return seconds_of(Path(f"/proc/{pid}/stat").read_text())


def family(pid: int) -> Iterator[int]:
    """Yield the ids of this process and all its descendants. Raises FileNotFoundError if this process has ended."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def by_name(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Return the CPU seconds that the processes with each name, and their descendants, have used so far."""
    return {name: sum(seconds(one) for pid in pids for one in family(pid)) for name, pids in processes.items()}
