"""Runs the webhook as on a machine that is suspended together with its clocks, for example a paused virtual machine.

Linux has a clock that includes suspension, and leases use it. Here a test can stop this clock while the process works.
So the process acts like a replica that was just resumed and does not yet know how much time has passed.
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
"""The environment variable with the name of the file that contains the stopped clock."""


class HeldClock:
    """Returns the seconds since boot, or the seconds in the file while the file exists."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> float:
        try:
            return float(self._file.read_text())
        except FileNotFoundError:
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Sleep by this clock. A retry every few milliseconds uses the real clock."""
        if seconds < namespace_ledger.FLUSH_SECONDS:
            await asyncio.sleep(seconds)
            return
        until = self() + seconds
        while self() < until:
            await asyncio.sleep(seconds / 4)

    def hold(self) -> None:
        """Stop the clock in every process that uses it, until `release`."""
        whole = self._file.with_suffix(".new")
        whole.write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
        whole.replace(self._file)

    def release(self) -> None:
        """Remove the file, so that the clock shows the true time again."""
        self._file.unlink(missing_ok=True)


class SuspendedWebhook(WebhookProcess):
    """A replica whose leases and flushes use a clock that this process can stop."""

    def __init__(self, flags: Sequence[str | Path], ca: Path, file: Path) -> None:
        self.held = HeldClock(file)
        command = (sys.executable, "-m", "tests.e2e.held_clock", "serve")
        super().__init__(flags, ca, {HELD_AT: str(file)}, command)


def main() -> None:
    """Run `vcuda-webhook` with that clock."""
    clock = HeldClock(Path(os.environ[HELD_AT]))
    ledgers = functools.partial(cluster_ledgers.ClusterLedgers, boot_clock=clock, sleep=clock.sleep)
    with mock.patch.object(cluster_ledgers, "ClusterLedgers", ledgers):
        cli.main()


if __name__ == "__main__":
    main()
