"""The quota that is missing for a charge, and the text of the rejection."""

import math

import msgspec

from vcuda.quota.model import Charge, Limit, Usage, cards, fits, mebibytes
from vcuda.quota.terms import NEVER_FITS, OVER_QUOTA


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """A request that exceeds the quota of one GPU model, with all numbers for the error message."""

    model: str
    asked: Charge
    usage: Usage
    limit: Limit

    @property
    def can_never_fit(self) -> bool:
        return not fits(self.limit, Charge(), self.asked)

    @property
    def rests_on_reserved(self) -> bool:
        """True if the request would fit if the webhook replicas had reserved no quota."""
        return fits(self.limit, self.usage.in_use, self.asked)

    @property
    def rests_on_pending(self) -> bool:
        """True if the request would fit if there were no pending charges and no reserved quota."""
        return fits(self.limit, self.usage.in_use - self.usage.pending, self.asked)

    @property
    def rests_on_terminating(self) -> bool:
        """True if the request would fit without the charges of deleted pods and without reserved quota."""
        return fits(self.limit, self.usage.in_use - self.usage.terminating, self.asked)

    @property
    def in_cores(self) -> bool:
        """True if the message must state the missing cores; False if it must state the missing memory."""
        cores, memory = self.limit.cores, self.limit.memory
        short = cores is not None and (self.usage.used + self.asked).cores > cores
        # A request for more memory than the limit can never fit, so the message must state the memory.
        hopeless = memory is not None and self.asked.memory_under(self.limit) > memory
        return short and (self.asked.cores > (cores or 0) or not hopeless)

    def sentence(self, namespace: str) -> str:
        """Return the message of a pod's rejection, which kubectl and the Events of a ReplicaSet show."""
        usage, limit, in_cores = self.usage, self.limit, self.in_cores
        what = f"{'' if in_cores else 'memory of '}{self.model} in namespace {namespace}"
        render, most = (cards, limit.cores) if in_cores else (mebibytes, limit.memory)

        def amount(charge: Charge) -> int:
            return math.ceil(charge.cores) if in_cores else charge.memory_under(limit)

        def bare(amount: int) -> str:
            return render(amount).partition(" ")[0]

        # The requested and the reserved amounts are differences of rounded sums, so that the message's numbers add up.
        used, total = amount(usage.in_use), amount(usage.used)
        asked = amount(usage.used + self.asked) - total
        missing = "can never fit" if self.can_never_fit else f"{bare(total + asked - (most or 0))} more needed"
        terminating = f", {bare(amount(usage.terminating))} terminating" if amount(usage.terminating) else ""
        taken = f"used: {bare(used)} ({bare(amount(usage.pending))} pending{terminating})"
        if total != used:
            taken = f"{taken}, {bare(total - used)} reserved"
        return f"{what}, requested: {render(asked)}, {taken}, limited: {bare(most or 0)}, {missing}"


def exceeded(namespace: str, *shortages: Shortage, later: bool = False) -> str:
    """Return the message for a request that exceeds the quota of every GPU model that it may use.

    ``later``: True if a grant that begins later makes room for the request.
    """
    words = OVER_QUOTA if later or not all(each.can_never_fit for each in shortages) else NEVER_FITS
    return f"{words}: " + "; ".join(shortage.sentence(namespace) for shortage in shortages)
