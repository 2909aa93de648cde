"""The quota that is missing for a charge, and the text of the rejection."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from vcuda.quota.model import Charge, Limit, Usage, card_count, cards, fits, mebibytes
from vcuda.quota.rejections import never_fits, over_quota
from vcuda.quota.terms import TOTAL


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """A request that exceeds the quota of one GPU model, with all numbers for the error message.

    ``of_total``: True if ``limit`` and ``usage`` are those of all models together. The request is for ``model``.
    """

    model: str
    asked: Charge
    usage: Usage
    limit: Limit
    of_total: bool = False

    @property
    def can_never_fit(self) -> bool:
        return not fits(self.limit, Charge(), self.asked)

    @property
    def rests_on_reserved(self) -> bool:
        """True if the request does not fit only because webhook replicas have reserved quota."""
        return fits(self.limit, self.usage.in_use, self.asked)

    @property
    def rests_on_pending(self) -> bool:
        """True if the request would fit without the pending charges and without reserved quota."""
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
        what = f"{'' if in_cores else 'memory of '}{TOTAL if self.of_total else self.model} in namespace {namespace}"
        render, most = (cards, limit.cores) if in_cores else (mebibytes, limit.memory)

        def amount(charge: Charge) -> int:
            return math.ceil(charge.cores) if in_cores else charge.memory_under(limit)

        def bare(amount: int) -> str:
            return card_count(amount) if in_cores else str(amount)

        # The used amounts and their sums are rounded. The requested and the reserved amounts are differences of these
        # rounded sums, so that the numbers in the message add up.
        used, total = amount(usage.in_use), amount(usage.used)
        asked = amount(usage.used + self.asked) - total
        missing = "can never fit" if self.can_never_fit else f"{bare(total + asked - (most or 0))} more needed"
        terminating = f", {bare(amount(usage.terminating))} terminating" if amount(usage.terminating) else ""
        taken = f"used: {bare(used)} ({bare(amount(usage.pending))} pending{terminating})"
        if total != used:
            taken = f"{taken}, {bare(total - used)} reserved"
        return f"{what}, requested: {render(asked)}, {taken}, limited: {bare(most or 0)}, {missing}"


def find_shortage(of_model: Shortage, limit: Limit | None, total_usage: Callable[[], Usage]) -> Shortage | None:
    """Return the shortage of the limit that the request exceeds: the model's limit, or that of all models together.

    Return None if the request fits. ``limit``: the limit of all models together; None if there is none.
    ``total_usage``: returns the usage of all models together.
    """
    found = [of_model]
    if limit is not None:
        found.append(Shortage(of_model.model, of_model.asked, total_usage(), limit, of_total=True))
        # If the request exceeds both limits, report the model's limit, because cards of the model count for both
        # limits. But if the request alone is larger than the limit of all models together, report this limit.
        found.sort(key=lambda each: each.of_total and each.can_never_fit, reverse=True)
    return next((each for each in found if not fits(each.limit, each.usage.used, each.asked)), None)


def exceeded(namespace: str, *shortages: Shortage, later: bool = False) -> str:
    """Return the message for a request that exceeds the quota of every GPU model that it may use.

    ``later``: True if a grant that begins later makes room for the request.
    """
    text = "; ".join(dict.fromkeys(shortage.sentence(namespace) for shortage in shortages))
    return never_fits(text) if not later and all(each.can_never_fit for each in shortages) else over_quota(text)


class MissingQuota(NamedTuple):
    """The missing quota of one model, in cards or MiB; None if the request is larger than the limit."""

    model: str
    needed: float | None
    of_memory: bool


_NEEDED = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)


def read_shortages(text: str) -> Iterator[MissingQuota]:
    """Yield the missing quota of each model in a text that contains messages of `Shortage`."""
    # The text may contain a long text from the pod, on which a regular expression could be slow. So the text is split.
    for sentence in text.split("; "):
        subject, _, rest = sentence.partition(" in namespace ")
        _, requested, figures = rest.partition(", requested: ")
        before, _, model = subject.rpartition(" ")
        needed = figures.partition(" more needed")[0].rpartition(" ")[2]
        never = "can never fit" in figures
        if requested and (never or (" more needed" in figures and _NEEDED.fullmatch(needed))):
            yield MissingQuota(model, None if never else float(needed), before.endswith("memory of"))
