"""The webhook on a machine that can be suspended together with its clocks, as a paused virtual machine is.

Linux has a clock that counts a suspension, and leases go by that one. Here it can be made to stand still while the
process works on: what a replica would do just after it was resumed, before anything tells it of the time that passed.
"""

import asyncio
import functools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from tests.processes import WebhookProcess
from webhook import cli
from webhook.ledger import cluster_ledgers, namespace_ledger

HELD_AT = "HELD_AT"
"""The environment's name of the file that holds the clock."""


class HeldClock:
    """Seconds since boot; while there is the file, those that it holds."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> float:
        try:
            return float(self._file.read_text())
        except FileNotFoundError:
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Sleep by this clock; the few milliseconds of one try after another pass in any case."""
        if seconds < namespace_ledger.FLUSH_SECONDS:
            await asyncio.sleep(seconds)
            return
        until = self() + seconds
        while self() < until:
            await asyncio.sleep(seconds / 4)

    def hold(self) -> None:
        """Let it stand still, in every process that goes by it, until it is released."""
        whole = self._file.with_suffix(".new")
        whole.write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
        whole.replace(self._file)

    def release(self) -> None:
        """Let it be right again."""
        self._file.unlink(missing_ok=True)


class SuspendedWebhook(WebhookProcess):
    """A replica whose leases and flushes go by a clock that this process holds."""

    def __init__(self, flags: Sequence[str | Path], ca: Path, file: Path) -> None:
        self.held = HeldClock(file)
        command = (sys.executable, "-m", "tests.e2e.held_clock", "serve")
        super().__init__(flags, ca, {HELD_AT: str(file)}, command)


def main() -> None:
    """`vcuda-webhook`, with that clock."""
    clock = HeldClock(Path(os.environ[HELD_AT]))
    ledgers = functools.partial(cluster_ledgers.ClusterLedgers, boot_clock=clock, sleep=clock.sleep)
    with mock.patch.object(cluster_ledgers, "ClusterLedgers", ledgers):
        cli.main()


if __name__ == "__main__":
    main()
