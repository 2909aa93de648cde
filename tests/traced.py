"""Finds the modules of this project whose functions a piece of code calls."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
PACKAGES = ("webhook", "vcuda", "controller", "certs")


def modules_of(work: Callable[[], object]) -> list[str]:
    """Return the modules of this project whose functions ``work`` calls, in the order of the first calls.

    Code that runs at import and threads that began earlier are left out.
    """
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and path.is_relative_to(ROOT):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[0] in PACKAGES:
                found.setdefault(".".join(parts))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(found)
