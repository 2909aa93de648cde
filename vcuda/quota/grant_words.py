"""Messages about grants (dated additions to a limit): a limit falls when a grant ends, and rises when one begins."""

import functools
import math
from collections.abc import Iterator

from vcuda.errors import Fault
from vcuda.quota import times
from vcuda.quota.model import Charge, Limit, NamespaceQuota, cards, fits
from vcuda.quota.shortage import Shortage


def ending(where: str, quota: NamespaceQuota, model: str, used: Charge) -> str | None:
    """Return a warning if the usage will exceed the limit when a grant (dated addition to it) ends; otherwise None.

    ``where``: whose limit it is, for example ``namespace team-a`` or ``team vision``.
    """
    until = quota.ends(model)
    if math.isinf(until):
        return None
    now, later = quota.limits[model], quota.at(until).limits[model]
    if fits(later, Charge(), used):
        return None
    zone = next(each.grant.times.zone for each in quota.granted if (each.model, each.until) == (model, until))
    when = times.shown_time(until, zone)
    falls = f"GPU quota: a grant ends at {when}: the limit of {model} in {where} falls"
    user = f"The {where.partition(' ')[0]} uses"
    memory_in_use = f"{user} {used.memory_under(now)} MiB"
    if now.cores is None or later.cores is None:
        return f"{falls} from {now} to {later}. {memory_in_use}"
    sentence = f"{falls} from {cards(now.cores)} to {cards(later.cores)}. {user} {cards(used.cores)}"
    if now.memory is None or later.memory is None:
        return sentence
    return f"{sentence}. The memory limit falls from {now.memory} to {later.memory} MiB. {memory_in_use}"


def coming(quota: NamespaceQuota, model: str, moment: float | None) -> str | None:
    """Return a message about the next grant (dated addition to a limit) of this model; None if no grant begins."""
    own = (quota.limits if quota.own is None else quota.own).get(model)
    if moment is None or (own is not None and own.blocks):
        return None
    grants = (each for each in quota.grants if model in each.limits and not each.times.holds(moment))
    begins = {each.times.next_change(moment): each for each in grants}
    begin = min(begins, default=math.inf)
    if math.isinf(begin):
        return None
    grant = begins[begin]
    return f"a grant adds {grant.limits[model]} of {model} at {times.shown_time(begin, grant.times.zone)}"


def makes_room(quota: NamespaceQuota, shortage: Shortage, moment: float | None) -> bool:
    """Return whether a grant (an addition to a limit) that begins later makes room for a request that lacks quota now.

    Grants do not raise the limit of all models together.
    """
    model, limit = shortage.model, shortage.limit
    if shortage.of_total or moment is None or coming(quota, model, moment) is None:
        return False
    begin = (each.limits[model] for each in quota.grants if model in each.limits and not each.times.holds(moment))
    return fits(functools.reduce(Limit.__add__, begin, limit), Charge(), shortage.asked)


def without_effect(quota: NamespaceQuota, moment: float) -> Iterator[Fault]:
    """Yield a warning for each grant that has ended, and for each grant of a model that the key ``quota`` sets to 0."""
    for at, grant in enumerate(quota.grants):
        if not grant.times.holds(moment) and math.isinf(grant.times.next_change(moment)):
            yield Fault(f"grants[{at}]", "the grant has ended and can be removed")
        for model in grant.limits:
            if model in quota.limits and quota.limits[model].blocks:
                yield Fault(f"grants[{at}].{model}", f"the grant has no effect, because `quota` sets {model} to 0")
