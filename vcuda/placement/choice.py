"""Chooses the GPU model of a pod or ResourceClaim among the models that this object may use."""

from collections.abc import Callable, Sequence

import msgspec

from vcuda.quota.model import Charge, Cores, Limit, Shortage, Usage, fits, free_of
from vcuda.quota.preference import PLACES, Rule
from vcuda.quota.terms import NO_QUOTA, would_be_pinned

MAX_PASSED_OVER = 3
"""The reason for a choice names at most this many of the models that come before the chosen model in the order."""

NO_NODE = "no node now"

NOT_ENFORCED = "over quota on every model, but the quota does not enforce its limits"


class Option(msgspec.Struct, frozen=True, gc=False):
    """One GPU model that an object (a pod or a claim) may use, with its quota and usage at the time of the choice."""

    model: str
    asked: Charge
    """The charge of the object if it uses this model."""
    limit: Limit
    usage: Usage
    ready: bool = True
    """True if a node of the model can take the object now."""
    fits_a_card: bool = True
    """False if no card of the model has room for the object's largest container; True if free cards are unknown."""
    free_cores: Cores = 0
    """The free cores of the model's cards minus the charges of pending pods; 0 if free cards are not published."""
    waits: Callable[[], str] = str
    """Returns why no node of the model can take the object now; empty if the nodes are unknown."""

    @property
    def has_room(self) -> bool:
        return fits(self.limit, self.usage.used, self.asked)

    @property
    def shortage(self) -> Shortage:
        return Shortage(self.model, self.asked, self.usage, self.limit)

    def obstacle(self, best: "Option") -> str:
        """Return the reason why ``best`` is chosen instead of this option, which is earlier in the order of models."""
        if not self.has_room:
            return NO_QUOTA
        return "no card with enough free cores" if self.ready == best.ready else self.waits() or NO_NODE


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The model chosen for an object, and the reason for the choice. ``rule``: the rule that ordered the models."""

    model: str
    reason: str
    rule: Rule = Rule.DOCUMENT
    by_nodes: bool = False
    """True if the states of the nodes have changed the choice, or if the object must wait for a node."""

    @property
    def forecast(self) -> str:
        """The message for a dry-run request: the model that would be chosen, and the reason."""
        return f"{would_be_pinned(self.model)}: {self.reason}"

    @property
    def notice(self) -> str:
        """The warning for other requests. Most choices need none."""
        return f"pinned to {self.model}: {self.reason}" if self.by_nodes else ""


def choose(options: Sequence[Option], rule: Rule) -> Choice | tuple[Shortage, ...]:
    """Choose the best option (GPU model) that fits its quota. If no option fits, return the `Shortage` of each option.

    ``options`` must be in the order of ``rule``. Options are compared by these criteria, the most important first:

    1. A node of the model can take the object now.
    2. If free cards are published, a card has room for the largest container.
    3. Only for `Rule.MOST_FREE`: the most free cores on cards, if published, and then the most free quota.
    4. The position in the order of the rule.
    """
    fitting = [option for option in options if option.has_room]
    if not fitting:
        return tuple(option.shortage for option in options)
    best = _best(fitting, rule)
    waits = "" if best.ready else best.waits()
    will_wait = waits and f"; the pod must wait for a node of {best.model}: {waits}"
    reason = f"{_reason(options, fitting, best, rule)}, {free_of(best.limit, best.usage)}{will_wait}"
    absent = best.ready and any(not each.ready for each in fitting)
    passed_over = absent and best is not min(fitting, key=lambda option: _rank(option, rule)[1:])
    return Choice(best.model, reason, rule, bool(waits) or passed_over)


def choose_regardless(options: Sequence[Option], rule: Rule) -> Choice:
    """Choose the best option, even if no option fits its quota. Use this for a quota in mode warn or audit.

    ``options`` must not be empty.
    """
    choice = choose(options, rule)
    return choice if isinstance(choice, Choice) else Choice(_best(options, rule).model, NOT_ENFORCED, rule)


def _best(options: Sequence[Option], rule: Rule) -> Option:
    return min(options, key=lambda option: _rank(option, rule))


def _rank(option: Option, rule: Rule) -> tuple[bool, bool, Cores, Cores]:
    absent, unfit = not option.ready, not option.fits_a_card
    if rule is not Rule.MOST_FREE:
        return absent, unfit, 0, 0
    return absent, unfit, -option.free_cores, -option.limit.free_cores(option.usage.used)


def _reason(options: Sequence[Option], fitting: Sequence[Option], best: Option, rule: Rule) -> str:
    if len(options) == 1:
        return "the only possible model"
    if len(fitting) == 1:
        return "the only model with enough quota"
    if rule is Rule.MOST_FREE:
        return _reason_by_room([each for each in fitting if each is not best], best)
    if best is options[0]:
        return f"the first in {PLACES[rule]}"
    return f"the next in {PLACES[rule]} after {_passed_over(options[: options.index(best)], best)}"


def _passed_over(before: Sequence[Option], best: Option) -> str:
    passed = ", ".join(f"{each.model} ({each.obstacle(best)})" for each in before[:MAX_PASSED_OVER])
    return f"{passed} and others" if len(before) > MAX_PASSED_OVER else passed


def _reason_by_room(others: Sequence[Option], best: Option) -> str:
    if best.ready and (absent := [each for each in others if not each.ready]):
        return f"a node of the model can take the pod now, unlike {_passed_over(absent, best)}"
    if best.fits_a_card and not all(each.fits_a_card for each in others):
        return "a card of the model has enough free cores now"
    more_cards = best.free_cores > max(each.free_cores for each in others)
    return "the model with the most free cards" if more_cards else "the model with the most free quota"
