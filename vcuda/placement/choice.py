"""Chooses the GPU model of a pod or ResourceClaim among the models that this object may use."""

from collections.abc import Callable, Sequence

import msgspec

from vcuda.quota.model import Charge, Limit, Shortage, Usage, fits, free_of
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
    waits: Callable[[], str] = str
    """Returns why no node of the model can take the object now; empty if the nodes are unknown."""

    @property
    def has_room(self) -> bool:
        return fits(self.limit, self.usage.used, self.asked)

    @property
    def shortage(self) -> Shortage:
        return Shortage(self.model, self.asked, self.usage, self.limit)

    @property
    def obstacle(self) -> str:
        """The reason why this option is not chosen although it is before the chosen option."""
        return self.waits() or NO_NODE if self.has_room else NO_QUOTA


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

    ``options`` must be in the order of ``rule``. The first option is the best of which a node can take the object now.
    Without such a node, the first option is the best.
    """
    fitting = [option for option in options if option.has_room]
    if not fitting:
        return tuple(option.shortage for option in options)
    best = _best(fitting)
    waits = "" if best.ready else best.waits()
    will_wait = waits and f"; the pod must wait for a node of {best.model}: {waits}"
    reason = f"{_reason(options, fitting, best, rule)}, {free_of(best.limit, best.usage)}{will_wait}"
    return Choice(best.model, reason, rule, bool(waits) or best is not fitting[0])


def choose_regardless(options: Sequence[Option], rule: Rule) -> Choice:
    """Choose the best option, even if no option fits its quota. Use this for a quota in mode warn or audit.

    ``options`` must not be empty.
    """
    choice = choose(options, rule)
    return choice if isinstance(choice, Choice) else Choice(_best(options).model, NOT_ENFORCED, rule)


def _best(options: Sequence[Option]) -> Option:
    return next((option for option in options if option.ready), options[0])


def _reason(options: Sequence[Option], fitting: Sequence[Option], best: Option, rule: Rule) -> str:
    if len(options) == 1:
        return "the only possible model"
    if len(fitting) == 1:
        return "the only model with enough quota"
    if best is options[0]:
        return f"the first in {PLACES[rule]}"
    before = options[: options.index(best)]
    passed = ", ".join(f"{each.model} ({each.obstacle})" for each in before[:MAX_PASSED_OVER])
    others = " and others" if len(before) > MAX_PASSED_OVER else ""
    return f"the next in {PLACES[rule]} after {passed}{others}"
