"""The loops of the leader, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog


def spawn(name: str, loop: Callable[[], None], on_fault: Callable[[], None]) -> threading.Thread:
    """Run a loop; ``on_fault`` is called when it ends by a fault of its own, as nobody would see that."""

    def guarded() -> None:
        try:
            loop()
        except Exception:  # noqa: BLE001  # it is logged, and whoever hears of the fault ends the process
            structlog.get_logger().exception("loop ended by a fault of its own", loop=name)
            on_fault()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
