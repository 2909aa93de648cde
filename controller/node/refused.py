"""How a step says that what it looked at must stay."""

from __future__ import annotations

from vcuda.errors import VcudaError
from vcuda.vm_directories import Keep, Reason


class Refused(VcudaError):
    """This directory, or for now every one, stays: ``keep`` tells why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        self.keep = Keep(reason, detail)
        super().__init__(str(self.keep))


def keep_after(error: VcudaError | OSError) -> Keep:
    """Return what went wrong as a reason to keep what it befell; an error of ours that is no refusal is the API's."""
    if isinstance(error, Refused):
        return error.keep
    if isinstance(error, OSError):
        return Keep(Reason.ERROR, error.strerror or str(error))
    return Keep(Reason.PODS_UNKNOWN, str(error))
