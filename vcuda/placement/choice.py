"""Chooses the GPU model of a pod or ResourceClaim among the models that this object may use."""

from collections.abc import Sequence

import msgspec

from vcuda.quota.model import Charge, Cores, Limit, Shortage, Usage, fits, free_of
from vcuda.quota.preference import PLACES, Rule
from vcuda.quota.terms import would_be_pinned

MAX_PASSED_OVER = 3
"""The reason for a choice names at most this many of the models that come before the chosen model in the order."""

NOT_ENFORCED = "over quota on every model, but the quota does not enforce its limits"


class Option(msgspec.Struct, frozen=True, gc=False):
    """One GPU model that an object (a pod or a claim) may use, with its quota and usage at the time of the choice."""

    model: str
    asked: Charge
    """The charge of the object if it uses this model."""
    limit: Limit
    usage: Usage
    present: bool = True
    """True if there is now a node of the model that can serve the object."""
    fits_a_card: bool = True
    """False if no card of the model has room for the object's largest container; True if free cards are unknown."""
    free_cores: Cores = 0
    """The free cores of the model's cards minus the charges of pending pods; 0 if free cards are not published."""

    @property
    def has_room(self) -> bool:
        return fits(self.limit, self.usage.used, self.asked)

    @property
    def shortage(self) -> Shortage:
        return Shortage(self.model, self.asked, self.usage, self.limit)

    def obstacle(self, best: "Option") -> str:
        """Return the reason why ``best`` is chosen instead of this option, which is earlier in the order of models."""
        if not self.has_room:
            return "not enough quota"
        return "no card with enough free cores" if self.present == best.present else "no node now"


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The model chosen for an object, and the reason for the choice. ``rule``: the rule that ordered the models."""

    model: str
    reason: str
    rule: Rule = Rule.DOCUMENT

    @property
    def forecast(self) -> str:
        """The message for a dry-run request: the model that would be chosen, and the reason."""
        return f"{would_be_pinned(self.model)}: {self.reason}"


def choose(options: Sequence[Option], rule: Rule) -> Choice | tuple[Shortage, ...]:
    """Choose the best option (GPU model) that fits its quota. If no option fits, return the `Shortage` of each option.

    ``options`` must be in the order of ``rule``. Options are compared by these criteria, the most important first:

    1. A node that can serve the object exists now.
    2. If free cards are published, a card has room for the largest container.
    3. Only for `Rule.MOST_FREE`: the most free cores on cards, if published, and then the most free quota.
    4. The position in the order of the rule.
    """
    fitting = [option for option in _ranked(options, rule) if option.has_room]
    if not fitting:
        return tuple(option.shortage for option in options)
    best = fitting[0]
    return Choice(best.model, f"{_reason(options, fitting, rule)}, {free_of(best.limit, best.usage)}", rule)


def choose_regardless(options: Sequence[Option], rule: Rule) -> Choice:
    """Choose the best option, even if no option fits its quota. Use this for a quota in mode warn or audit.

    ``options`` must not be empty.
    """
    choice = choose(options, rule)
    return choice if isinstance(choice, Choice) else Choice(_ranked(options, rule)[0].model, NOT_ENFORCED, rule)


def _ranked(options: Sequence[Option], rule: Rule) -> list[Option]:
    def rank(option: Option) -> tuple[bool, bool, Cores, Cores]:
        absent, unfit = not option.present, not option.fits_a_card
        if rule is not Rule.MOST_FREE:
            return absent, unfit, 0, 0
        return absent, unfit, -option.free_cores, -option.limit.free_cores(option.usage.used)

    return sorted(options, key=rank)


def _reason(options: Sequence[Option], fitting: Sequence[Option], rule: Rule) -> str:
    best = fitting[0]
    if len(options) == 1:
        return "the only possible model"
    if len(fitting) == 1:
        return "the only model with enough quota"
    if rule is Rule.MOST_FREE:
        return _reason_by_room(fitting)
    if best is options[0]:
        return f"the first in {PLACES[rule]}"
    before = options[: options.index(best)]
    passed = ", ".join(f"{each.model} ({each.obstacle(best)})" for each in before[:MAX_PASSED_OVER])
    more = " and others" if len(before) > MAX_PASSED_OVER else ""
    return f"the next in {PLACES[rule]} after {passed}{more}"


def _reason_by_room(fitting: Sequence[Option]) -> str:
    best, others = fitting[0], fitting[1:]
    if best.present and not all(each.present for each in others):
        return "a node of the model can take the pod now"
    if best.fits_a_card and not all(each.fits_a_card for each in others):
        return "a card of the model has enough free cores now"
    more_cards = best.free_cores > others[0].free_cores
    return "the model with the most free cards" if more_cards else "the model with the most free quota"
