"""Kills a process with SIGKILL once the API server has answered a request of its, before it has the answer."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from tests.e2e.lossy_proxy import Losses

READS = frozenset({"GET"})


@dataclass
class Fatal(Losses):
    """Counts the requests of ``victim`` (a process id); the answer to the fatal one is lost together with it.

    ``read``: the number of the read that kills, from 1; 0 for none: then the first write does.
    """

    victim: int = 0
    read: int = 0
    reads: int = 0

    def aim(self, read: int) -> None:
        """Begin to count for a new process; set ``victim`` when it has started."""
        self.victim, self.read, self.reads = 0, read, 0

    def takes(self, method: str, path: str) -> bool:
        """Kill at the fatal answer. What was written by then is written."""
        with self._lock:
            self.reads += method in READS
            if (self.reads != self.read) if self.read else (method in READS):
                return False
            self.lost.append((method, path))
            os.kill(self.victim, signal.SIGKILL)
            return True
