"""Messages about limits that fall when a grant ends, or that rise when a grant begins."""

import math
from collections.abc import Iterator

from vcuda.quota import times
from vcuda.quota.model import Charge, NamespaceQuota, cards, fits


def ending(namespace: str, quota: NamespaceQuota, model: str, used: Charge) -> str | None:
    """Return a warning if the present usage will exceed the limit when the next grant ends; otherwise None."""
    until = quota.ends(model)
    if math.isinf(until):
        return None
    now, later = quota.limits[model], quota.at(until).limits[model]
    if fits(later, Charge(), used):
        return None
    zone = next(each.grant.times.zone for each in quota.granted if (each.model, each.until) == (model, until))
    if now.cores is None or later.cores is None:
        figures = f"from {now} to {later}, {used.memory_under(now)} MiB in use"
    else:
        figures = f"from {cards(now.cores)} to {cards(later.cores)}, {cards(used.cores)} in use"
    if now.cores is not None and now.memory is not None and later.memory is not None:
        figures += f"; its memory from {now.memory} to {later.memory} MiB, {used.memory_under(now)} MiB in use"
    when = times.shown(until, zone)
    return f"GPU quota: a grant ends at {when}: the limit of {model} in namespace {namespace} falls {figures}"


def coming(quota: NamespaceQuota, model: str, moment: float | None) -> str | None:
    """Return a phrase with the time when the next grant of this model begins; None if no grant begins."""
    own = (quota.limits if quota.own is None else quota.own).get(model)
    if moment is None or (own is not None and own.blocks):
        return None
    grants = (each for each in quota.grants if model in each.limits and not each.times.holds(moment))
    begins = {each.times.next_change(moment): each for each in grants}
    begin = min(begins, default=math.inf)
    if math.isinf(begin):
        return None
    grant = begins[begin]
    return f"a grant adds {grant.limits[model]} of {model} at {times.shown(begin, grant.times.zone)}"


def without_effect(quota: NamespaceQuota, moment: float) -> Iterator[str]:
    """Yield a warning for each grant that has ended, and for each granted model that ``quota`` sets to 0."""
    for at, grant in enumerate(quota.grants):
        if not grant.times.holds(moment) and math.isinf(grant.times.next_change(moment)):
            yield f"grants[{at}]: has ended and can be removed"
        for model in grant.limits:
            if model in quota.limits and quota.limits[model].blocks:
                yield f"grants[{at}].{model}: has no effect, because `quota` sets {model} to 0"
