"""The faults that the checks of ``kubectl gpuquota doctor`` find."""

from typing import NamedTuple

OK, WRONG, UNKNOWN = "ok", "wrong", "unknown"
MAX_NAMES = 5
"""The maximum number of names that one finding lists."""
MISSING_PERMISSION = "Give your account this permission"


class Defect(NamedTuple):
    """A fault that a check found. ``action``: what to do. ``state``: `WRONG`, or `UNKNOWN` if it cannot be read."""

    text: str
    action: str
    state: str = WRONG
