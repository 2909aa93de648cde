"""Chooses the GPU model of an object (a pod or ResourceClaim) among the models that it may use.

The order in which the models are tried comes from the first of these sources that exists:

1. The annotation `MODELS_ANNOTATION` of the object. ``H100, A100`` means these two models and no others. A final ``*``
   stands for the other models of the quota entry.
2. ``order`` in the quota entry. The other models of the entry follow.
3. The order of the models in the quota entry.
"""

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import msgspec

from vcuda.quota.model import NO_LIMIT, Charge, Limit, NamespaceQuota, Usage, card_count, cards, fits
from vcuda.quota.rejections import NO_QUOTA, passed_over, would_be_pinned
from vcuda.quota.shortage import Shortage, find_shortage
from vcuda.quota.values import listed, printable, suggestion
from vcuda.quota.well_known import MODELS_ANNOTATION

OTHERS = "*"
"""The item at the end of the models annotation that stands for all other models of the quota entry."""

MAX_CHARACTERS = 2048
"""The maximum length of the models annotation. It is enough for 32 names of 63 characters, the longest allowed name."""

MAX_NAMED = 10
"""The maximum number of GPU models that an error message lists."""


class Rule(enum.StrEnum):
    """The rule for the order in which the GPU models that an object may use are tried."""

    ANNOTATION = "annotation"
    ORDER = "order"
    DOCUMENT = "document"


PLACES = {
    Rule.ANNOTATION: f"annotation {MODELS_ANNOTATION}",
    Rule.ORDER: "`order` of the namespace's quota",
    Rule.DOCUMENT: "the namespace's quota",
}
"""The names, used in messages, of the places where people set the order in which models are tried."""


class Wish(msgspec.Struct, frozen=True, gc=False):
    """The GPU models that the models annotation of an object names, in the annotation's order."""

    models: tuple[str, ...]
    rest: bool = False
    """True if the annotation ends with ``*``, so that the other models of the quota entry follow."""

    def unknown(self, known: Set[str]) -> str | None:
        """Return a message about the first named model that is not in ``known``; None if ``known`` has all of them."""
        for model in self.models:
            if model not in known:
                hint = suggestion(model, known) or f"supported models: {listed(sorted(known), MAX_NAMED)}"
                return f'unknown GPU model "{printable(model)}"; {hint}'
        return None

    def unlisted(self, namespace: str, quota: NamespaceQuota) -> str | None:
        """Return a message about the first named model that the quota does not list; None if it lists all of them."""
        for model in self.models:
            if model not in quota.limits:
                return (
                    f"annotation {MODELS_ANNOTATION} names {printable(model)}, but the quota of namespace {namespace} "
                    f"lists only {listed(quota.limits, MAX_NAMED)}"
                )
        return None


def read_wish(annotations: Mapping[str, str]) -> Wish | None:
    """Parse the models annotation. Return None if it is missing. Raises ValueError if it is malformed."""
    text = annotations.get(MODELS_ANNOTATION)
    if text is None:
        return None
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"must not be longer than {MAX_CHARACTERS} characters")
    *named, last = (part.strip() for part in text.split(","))
    rest = last == OTHERS
    if not rest:
        named.append(last)
    if not all(named) or OTHERS in named:
        raise ValueError(
            "must be GPU models separated by commas, the best first, for example `H100, A100`. A `*` must be last"
        )
    return Wish(tuple(dict.fromkeys(named)), rest)


def ordered_models(annotations: Mapping[str, str], quota: NamespaceQuota) -> tuple[tuple[str, ...], Rule]:
    """Return the models that an object with these annotations may use, in the order in which they are tried, and the
    rule for that order. A malformed annotation is ignored."""
    try:
        wish = read_wish(annotations) or Wish(())
    except ValueError:
        wish = Wish(())
    named = dict.fromkeys((*wish.models, *(quota.limits if wish.rest else ())))
    if models := tuple(model for model in named if model in quota.limits):
        return models, Rule.ANNOTATION
    if quota.order:
        return tuple(dict.fromkeys((*quota.order, *quota.limits))), Rule.ORDER
    return tuple(quota.limits), Rule.DOCUMENT


MAX_PASSED_OVER = 3
"""The reason for a choice names at most this many of the models that come before the chosen model in the order."""

NO_NODE = "no node now"

NOT_ENFORCED = "over quota on every model, but the quota does not enforce its limits"


class Option(msgspec.Struct, frozen=True, gc=False):
    """One GPU model that an object (a pod or a claim) may use, with its quota and usage at the time of the choice."""

    model: str
    asked: Charge
    """The charge of the object if it uses this model."""
    quota: NamespaceQuota
    """The quota of the object's namespace."""
    usage: Usage
    ready: bool = True
    """True if a node of the model can take the object now."""
    waits: Callable[[], str] = str
    """Returns why no node of the model can take the object now; empty if the nodes are unknown."""
    total_usage: Callable[[], Usage] = Usage
    """Returns the usage of all models together. Their limit does not change the choice."""

    @property
    def limit(self) -> Limit:
        return self.quota.limits[self.model]

    @property
    def has_room(self) -> bool:
        if not fits(self.limit, self.usage.used, self.asked):
            return False
        of_team = self.quota.team.limits.get(self.model, NO_LIMIT) if self.quota.team else None
        return of_team is None or fits(of_team, self.usage.used + self.usage.others, self.asked)

    @property
    def free(self) -> str:
        """A phrase with the free quota of the namespace and of its team."""
        if (team := self.quota.team) is None:
            return free_of(self.limit, self.usage)
        of_team = team.limits.get(self.model, NO_LIMIT)
        usage = msgspec.structs.replace(self.usage, used=self.usage.used + self.usage.others)
        own = "" if of_team == self.limit else f"{free_of(self.limit, self.usage)}, "
        return f"{own}{free_of(of_team, usage)} in team {team.name}"

    @property
    def shortage(self) -> Shortage | None:
        """The quota that is missing for the object; None if it fits."""
        of_model = Shortage(self.model, self.asked, self.usage, self.limit)
        return find_shortage(of_model, self.quota.total, self.total_usage, self.quota.team)

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
        return would_be_pinned(self.model, self.reason)

    @property
    def notice(self) -> str:
        """The warning for a request that is not a dry run; empty if the states of nodes did not affect the choice."""
        return f"pinned to {self.model}: {self.reason}" if self.by_nodes else ""


def choose(options: Sequence[Option], rule: Rule) -> Choice | tuple[Shortage, ...]:
    """Choose the best option (GPU model) that fits its quota. If no option fits, return the `Shortage` of each option.

    ``options`` must be in the order of ``rule``. The best option is the first one of which a node can take the object
    now. If there is no such node, the best option is the first one.
    """
    fitting = [option for option in options if option.has_room]
    if not fitting:
        return shortages_of(options)
    best = _best(fitting)
    waits = "" if best.ready else best.waits()
    will_wait = waits and f"; the pod must wait for a node of {best.model}: {waits}"
    reason = f"{_reason(options, fitting, best, rule)}, {best.free}{will_wait}"
    return Choice(best.model, reason, rule, bool(waits) or best is not fitting[0])


def shortages_of(options: Iterable[Option]) -> tuple[Shortage, ...]:
    """Return the missing quota of each option (GPU model) with which the object would exceed the quota."""
    return tuple(shortage for option in options if (shortage := option.shortage))


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
    passed = ", ".join(passed_over(each.model, each.obstacle) for each in before[:MAX_PASSED_OVER])
    tail = " and others" if len(before) > MAX_PASSED_OVER else ""
    return f"the next in {PLACES[rule]} after {passed}{tail}"


def free_of(limit: Limit, usage: Usage) -> str:
    """Return a phrase with the free quota under a limit. Reserved quota is not free, and is stated separately."""
    if limit.cores is None:
        used, in_use = usage.used.memory_under(limit), usage.in_use.memory_under(limit)
        free = f"{(limit.memory or 0) - used} of {limit} free"
        return f"{free}, {used - in_use} reserved" if used > in_use else free
    free = f"{cards(math.floor(limit.cores - usage.used.cores))} of {cards(limit.cores)} free"
    return f"{free}, {card_count(usage.reserved.cores)} reserved" if usage.reserved.cores else free
