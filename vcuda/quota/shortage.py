"""The quota that is missing for a charge, and the text of the rejection."""

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vcuda.quota.model import NO_LIMIT, Charge, Limit, Team, Usage, card_count, cards, fits, mebibytes
from vcuda.quota.rejections import never_fits, over_quota
from vcuda.quota.well_known import TOTAL


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """A request that exceeds the quota of one GPU model, with all numbers for the error message.

    ``of_total``: True if ``limit`` and ``usage`` are those of all models together. The request is for ``model``.
    ``team``: the name of the team if ``limit`` is that of the team; empty if it is that of the namespace.
    """

    model: str
    asked: Charge
    usage: Usage
    limit: Limit
    of_total: bool = False
    team: str = ""

    @property
    def others(self) -> Charge:
        """The allotments of the other namespaces of the team; empty if ``team`` is not set."""
        return self.usage.others if self.team else Charge()

    @property
    def missing(self) -> bool:
        """True if the request exceeds the limit."""
        return not self._fits(self.usage.used)

    def _fits(self, used: Charge) -> bool:
        return fits(self.limit, used + self.others, self.asked)

    @property
    def can_never_fit(self) -> bool:
        return not fits(self.limit, Charge(), self.asked)

    @property
    def rests_on_reserved(self) -> bool:
        """True if the request does not fit only because webhook replicas have reserved quota."""
        return self._fits(self.usage.in_use)

    @property
    def rests_on_pending(self) -> bool:
        """True if the request would fit without the pending charges and without reserved quota."""
        return self._fits(self.usage.in_use - self.usage.pending)

    @property
    def rests_on_terminating(self) -> bool:
        """True if the request would fit without the charges of deleted pods and without reserved quota."""
        return self._fits(self.usage.in_use - self.usage.terminating)

    @property
    def in_cores(self) -> bool:
        """True if the message must state the missing cores; False if it must state the missing memory."""
        cores, memory = self.limit.cores, self.limit.memory
        short = cores is not None and (self.usage.used + self.others + self.asked).cores > cores
        # A request for more memory than the limit can never fit, so the message must state the memory.
        hopeless = memory is not None and self.asked.memory_under(self.limit) > memory
        return short and (self.asked.cores > (cores or 0) or not hopeless)

    def sentence(self, namespace: str, *, later: bool = False) -> str:
        """Return the message of a pod's rejection, which kubectl and the Events of a ReplicaSet show.

        ``later``: True if a grant that begins later makes room for the request.
        """
        usage, limit, in_cores = self.usage, self.limit, self.in_cores
        where = f"team {self.team}" if self.team else f"namespace {namespace}"
        what = f"{'' if in_cores else 'memory of '}{TOTAL if self.of_total else self.model} in {where}"
        render, most = (cards, limit.cores) if in_cores else (mebibytes, limit.memory)

        def amount(charge: Charge) -> int:
            return math.ceil(charge.cores) if in_cores else charge.memory_under(limit)

        def bare(amount: int) -> str:
            return card_count(amount) if in_cores else str(amount)

        # The used amounts and their sums are rounded. The requested and the reserved amounts are differences of these
        # rounded sums, so that the numbers in the message add up.
        others, everything = self.others, usage.used + self.others
        used, total = amount(usage.in_use + others), amount(everything)
        asked = amount(everything + self.asked) - total
        never = self.can_never_fit and not later
        missing = "can never fit" if never else f"{bare(total + asked - (most or 0))} more needed"
        terminating = f", {bare(amount(usage.terminating))} terminating" if amount(usage.terminating) else ""
        own = amount(usage.in_use)
        of_team = f"this namespace {bare(own)}, others {bare(used - own)}"
        of_namespace = f"{bare(amount(usage.pending))} pending{terminating}"
        taken = f"used: {bare(used)} ({of_team if self.team else of_namespace})"
        if total != used:
            taken = f"{taken}, {bare(total - used)} reserved"
        return f"{what}, requested: {render(asked)}, {taken}, limited: {bare(most or 0)}, {missing}"


def find_shortage(
    of_model: Shortage, limit: Limit | None, total_usage: Callable[[], Usage], team: Team | None = None
) -> Shortage | None:
    """Return the shortage of the limit that the request exceeds. Return None if the request fits.

    ``of_model``: by the namespace's limit of the model. ``limit``: the namespace's limit of all models together; None
    if there is none. ``total_usage``: returns the usage of all models together. ``team``: the team, whose limits hold
    too.
    """
    found, model = [], of_model.model
    # If the entry of the namespace has no limits, the limits of its team are used. Then the message names the team.
    if team is None or team.limits.get(model) != of_model.limit:
        found.append(of_model)
    if limit is not None and (team is None or team.total != limit):
        found.append(replace(of_model, usage=total_usage(), limit=limit, of_total=True))
    if team is not None:
        found.append(replace(of_model, limit=team.limits.get(model, NO_LIMIT), team=team.name))
        if team.total is not None:
            found.append(replace(of_model, usage=total_usage(), limit=team.total, of_total=True, team=team.name))
    # If the request exceeds several limits, report the model's limit, because cards of the model count for each of
    # them. But if the request alone is larger than the limit of all models together, report this limit.
    found.sort(key=lambda each: each.of_total and each.can_never_fit, reverse=True)
    return next((each for each in found if each.missing), None)


def exceeded(namespace: str, *shortages: Shortage, later: bool = False) -> str:
    """Return the message for a request that exceeds the quota of every GPU model that it may use.

    ``later``: True if a grant that begins later makes room for the request.
    """
    text = "; ".join(dict.fromkeys(shortage.sentence(namespace, later=later) for shortage in shortages))
    return never_fits(text) if not later and all(each.can_never_fit for each in shortages) else over_quota(text)


class MissingQuota(NamedTuple):
    """The missing quota of one model, in cards or MiB; None if the request is larger than the limit."""

    model: str
    needed: float | None
    of_memory: bool
    team: str = ""
    """The team whose limit is exceeded; empty if it is the limit of the namespace."""


_NEEDED = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)


def read_shortages(text: str) -> Iterator[MissingQuota]:
    """Yield the missing quota of each model in a text that contains messages of `Shortage`."""
    # The text may contain a long text from the pod, on which a regular expression could be slow. So the text is split.
    for sentence in text.split("; "):
        subject, own, rest = sentence.partition(" in namespace ")
        if not own:
            subject, _, rest = sentence.partition(" in team ")
        name, requested, figures = rest.partition(", requested: ")
        before, _, model = subject.rpartition(" ")
        needed = figures.partition(" more needed")[0].rpartition(" ")[2]
        never = "can never fit" in figures
        if requested and (never or (" more needed" in figures and _NEEDED.fullmatch(needed))):
            missing = None if never else float(needed)
            yield MissingQuota(model, missing, before.endswith("memory of"), "" if own else name)
