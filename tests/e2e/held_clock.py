"""Runs the webhook as on a virtual machine whose clocks are paused together with it.

Reservations expire by a Linux clock that includes suspensions. A test can stop this clock while the process runs, as
for a replica that has just resumed, before its clock shows the pause.
"""

import asyncio
import functools
import os
import sys
import time
from pathlib import Path
from unittest import mock

from webhook import cli
from webhook.ledger import ledgers, namespace_ledger

COMMAND = (sys.executable, "-m", "tests.e2e.held_clock", "serve")
"""The command line of a webhook whose reservations and flushes (writes of its charges) use a clock of the tests."""
HELD_AT = "HELD_AT"
"""The environment variable with the name of the file that contains the stopped clock."""


class HeldClock:
    """Returns the seconds since boot. While its file exists, it always returns the time in the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self) -> float:
        try:
            return float(self._file.read_text())
        except FileNotFoundError:
            return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds`` of this clock. Times below FLUSH_SECONDS, as before a retry, are of the real clock."""
        if seconds < namespace_ledger.FLUSH_SECONDS:
            await asyncio.sleep(seconds)
            return
        until = self() + seconds
        while self() < until:
            await asyncio.sleep(seconds / 4)

    def hold(self) -> None:
        whole = self._file.with_suffix(".new")
        whole.write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
        whole.replace(self._file)

    def release(self) -> None:
        self._file.unlink(missing_ok=True)


def main() -> None:
    clock = HeldClock(Path(os.environ[HELD_AT]))
    held = functools.partial(ledgers.ClusterLedgers, boot_clock=clock, sleep=clock.sleep)
    with mock.patch.object(ledgers, "ClusterLedgers", held):
        cli.main()


if __name__ == "__main__":
    main()
