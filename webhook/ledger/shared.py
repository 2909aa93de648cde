"""The objects that the ledgers of all namespaces and teams share in one webhook replica."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from vcuda.kube import LedgerStore, TeamMap, TeamStore
from webhook.metrics import LedgerMetrics

T = TypeVar("T")

# The number of threads for reads and writes of ledgers. It bounds how many ledgers are written at the same time.
KUBE_THREADS = 32

# The number of threads for LISTs. Most of them only wait, because `ListTurns` lets few LISTs run at the same time.
LIST_THREADS = 32

READ_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a read of a ledger. The timeout is short, so that waiting reviews still get an answer."""

WRITE_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a ledger write. After a timeout the outcome of the write is unknown, so the replica reads or
writes the ledger again."""

REMEMBERED_SECONDS = 1.0
"""For this many seconds, this replica may write a ledger from its copy in memory, without another read. In a longer
time, another process has usually written the ledger. The write would then fail, which costs more than a read."""


def boot_seconds() -> float:
    """Return the seconds since this machine booted, including the time in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(eq=False)
class Shared:
    """The objects that all ledgers share in one webhook replica.

    ``store`` reads and writes the ledgers. ``boot_clock`` also runs while the machine is suspended.
    ``team_map`` returns the teams of namespaces; None if they are unknown. ``leaving``: True if the replica is
    stopping. It then reserves nothing. ``threads`` run reads and writes of ledgers.
    ``list_threads`` run LISTs.
    """

    store: LedgerStore
    metrics: LedgerMetrics
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    boot_clock: Callable[[], float] = boot_seconds
    leaving: bool = False
    team_map: Callable[[], TeamMap | None] = lambda: None
    # Each call to the API server blocks a thread. So the numbers of threads bound the number of concurrent calls. A
    # thread adds 50 µs to a call, which is little compared with the milliseconds of a write.
    threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(KUBE_THREADS, thread_name_prefix="ledger"))
    list_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(LIST_THREADS, thread_name_prefix="list"))

    @functools.cached_property
    def teams(self) -> TeamStore:
        return TeamStore(self.store)

    async def in_thread(self, call: Callable[..., T], *args: object) -> T:
        # If the awaiting task is cancelled, the thread still finishes the call. So a write may be stored although no
        # task waits for its answer.
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *args)

    async def listed(self, call: Callable[..., T], *args: object) -> T:
        """Make a LIST in a thread."""
        self.metrics.lists.inc()
        return await asyncio.get_running_loop().run_in_executor(self.list_threads, call, *args)
