"""The differences between two quotas, for the log and as warnings to the author of an edit."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.quota.model import CORES_PER_CARD, DEFAULT, Grant, Limit, Mode, NamespaceQuota, Quota, cards

DERIVED = ("limits", "own", "granted")
"""Fields that are not compared as a whole: limits are compared by model, and the other two follow from the grants."""

LONGEST_CHANGE = 200
"""The most characters of one change in a summary. An entry may list hundreds of models."""

_ROOM_FOR_MORE = 40
_AND_MORE = "; and {} more changes"

_STRICTNESS = {Mode.AUDIT: 0, Mode.WARN: 1, Mode.ENFORCE: 2}


class QuotaChange(NamedTuple):
    """One value that differs between two quotas, with its path in the document. An empty text stands for no value."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before or 'nothing'} -> {self.after or 'nothing'}"

    @property
    def shown(self) -> str:
        text = str(self)
        return text if len(text) <= LONGEST_CHANGE else f"{text[: LONGEST_CHANGE - 1]}…"


def changes(old: Quota, new: Quota) -> Iterator[QuotaChange]:
    """Yield every difference between two quotas, in the order of the entries."""
    before, after = old.entries, new.entries
    for namespace in dict.fromkeys((*before, *after)):
        was, will = before.get(namespace), after.get(namespace)
        if was == will:
            continue
        if was is None or will is None:
            yield QuotaChange(namespace, _entry(was), _entry(will))
        else:
            yield from _within(namespace, was, will)


def summary(old: Quota, new: Quota, longest: int) -> str:
    """Return the first differences in at most ``longest`` characters, which must be at least `LONGEST_CHANGE` + 40."""
    text, different = "", changes(old, new)
    for change in different:
        longer = f"{text}; {change.shown}" if text else change.shown
        if len(longer) + _ROOM_FOR_MORE > longest:
            return text + _AND_MORE.format(1 + sum(1 for _ in different))
        text = longer
    return text


def _within(namespace: str, was: NamespaceQuota, will: NamespaceQuota) -> Iterator[QuotaChange]:
    for model in dict.fromkeys((*was.limits, *will.limits)):
        pair = _limit(was, model), _limit(will, model)
        if pair[0] != pair[1]:
            yield QuotaChange(f"{namespace}.quota.{model}", *pair)
    for name in NamespaceQuota.__struct_fields__:
        if name in DERIVED:
            continue
        pair = _plain(getattr(was, name)), _plain(getattr(will, name))
        if pair[0] != pair[1]:
            yield QuotaChange(f"{namespace}.{name}", *pair)


def weakened(old: Quota, new: Quota) -> Iterator[str]:
    """Yield a warning for each entry that is removed, and for each entry whose mode becomes less strict."""
    before, after = old.entries, new.entries
    for namespace, was in before.items():
        will = after.get(namespace)
        if will is None:
            instead = f'the entry "{DEFAULT}" applies' if new.default and namespace != DEFAULT else "no limit applies"
            yield f"{namespace}: the entry is removed ({_entry(was)}); {instead}"
        elif _STRICTNESS[will.mode] < _STRICTNESS[was.mode]:
            yield f"{namespace}.mode: changes from {was.mode} to {will.mode}"


def beyond(old: Quota, new: Quota, cards_of: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each limit or sum of limits that is raised above ``cards_of``, the cards of each model."""
    before, after = ({name: _most_cores(each, new.moment) for name, each in of.entries.items()} for of in (old, new))
    for namespace, limits in after.items():
        for model, limit in limits.items():
            was = before.get(namespace, {}).get(model, 0)
            if model in cards_of and limit > max(was, cards_of[model] * CORES_PER_CARD):
                granted = (
                    " with all grants" if any(model in each.limits for each in new.entries[namespace].grants) else ""
                )
                values = f"raised from {cards(was)} to {cards(limit)}{granted}"
                yield f"{namespace}.quota.{model}: {values}; {_have(model, cards_of)}"
    for model in sorted(cards_of):
        was_sum, is_sum = (sum(limits.get(model, 0) for limits in each.values()) for each in (before, after))
        if is_sum > max(was_sum, cards_of[model] * CORES_PER_CARD):
            yield f"{model}: the limits add up to {cards(is_sum)}, before {cards(was_sum)}; {_have(model, cards_of)}"


def _have(model: str, cards_of: Mapping[str, int]) -> str:
    return f"the nodes have {cards(cards_of[model] * CORES_PER_CARD)}"


def _most_cores(entry: NamespaceQuota, moment: float | None) -> dict[str, int]:
    """Return the limit of each model plus all grants that have not ended, in hundredths of a card."""
    # Grants that never hold at the same time are all added, because finding them would take thousands of comparisons.
    most = {model: limit.most_cores for model, limit in entry.at(None).limits.items()}
    for grant in entry.grants:
        if moment is not None and moment < grant.times.end:
            for model, added in grant.limits.items():
                most[model] += 0 if model in entry.limits and entry.limits[model].blocks else added.most_cores
    return most


def _entry(entry: NamespaceQuota | None) -> str:
    if entry is None:
        return ""
    limits = _limits(entry.limits) or "no model"
    return limits if entry.mode is Mode.ENFORCE else f"{entry.mode}, {limits}"


def _limit(entry: NamespaceQuota, model: str) -> str:
    return str(entry.limits[model]) if model in entry.limits else ""


def _limits(limits: Mapping[str, Limit]) -> str:
    return ", ".join(f"{model}: {limit}" for model, limit in limits.items())


def _plain(value: object) -> str:
    if isinstance(value, tuple) and value and all(isinstance(each, Grant) for each in value):
        return "; ".join(f"{_limits(each.limits)} {each.times}" for each in value)
    if isinstance(value, frozenset):
        value = sorted(value)
    return msgspec.json.encode(value, enc_hook=str).decode()
