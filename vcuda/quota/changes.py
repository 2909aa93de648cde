"""The differences between two quotas, for the log and as warnings to the author of an edit."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.errors import Fault
from vcuda.quota.model import (
    CORES_PER_CARD,
    DEFAULT,
    Charge,
    Grant,
    Limit,
    Mode,
    NamespaceQuota,
    Quota,
    cards,
)
from vcuda.quota.values import listed
from vcuda.quota.well_known import TEAMS, TOTAL, team_path

DERIVED = ("limits", "own", "granted", "excepted", "team")
"""The fields of a quota entry that are not compared as a whole. The fields ``limits`` and ``excepted`` are compared
item by item. The fields ``own``, ``granted`` and ``team`` are computed from the other fields and the moment."""

MAX_CHANGE_LENGTH = 200
"""The maximum length of one change in a summary. Longer changes are cut, because they may list hundreds of models."""

_ROOM_FOR_MORE = 40
"""The number of characters that are kept free at the end of a summary, to state how many changes are not listed."""

MAX_EXCEPTED_SHOWN = 20
"""The most names of ``except`` in one message."""

MAX_FIELDS = 3
"""The most fields of a quota document that one warning names."""


class QuotaChange(NamedTuple):
    """One value that differs between two quotas. ``before`` or ``after`` is empty if one quota has no such value."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before or 'nothing'} -> {self.after or 'nothing'}"

    @property
    def shown(self) -> str:
        text = str(self)
        return text if len(text) <= MAX_CHANGE_LENGTH else f"{text[: MAX_CHANGE_LENGTH - 1]}…"


def changes(old: Quota, new: Quota) -> Iterator[QuotaChange]:
    """Yield every difference between two quotas, in the order in which the quotas list the namespaces."""
    before, after = old.entries, new.entries
    for namespace in dict.fromkeys((*before, *after)):
        was, will = before.get(namespace), after.get(namespace)
        if was and will and namespace in new.namespaces:
            will = _apart_from_team(namespace, (old, was), (new, will))
        if was == will:
            continue
        if was is None or will is None:
            yield QuotaChange(namespace, _entry(was), _entry(will))
        else:
            yield from _within(namespace, was, will)
    for team in dict.fromkeys((*old.teams, *new.teams)):
        left, joined = ({*quota.members.items.get(team, ())} for quota in (old, new))
        for item in sorted(left ^ joined):
            yield QuotaChange(f"{team_path(team)}.namespaces", *(item, "") if item in left else ("", item))


def _apart_from_team(
    namespace: str, before: tuple[Quota, NamespaceQuota], after: tuple[Quota, NamespaceQuota]
) -> NamespaceQuota:
    """Return the entry of a namespace after an edit, without the changes that the entry has from its team."""
    (old, was), (new, will) = before, after
    team = new.members.team_of(namespace)
    if team is None or team != old.members.team_of(namespace):
        return will
    pairs, fields = ((was, old.teams[team]), (will, new.teams[team])), NamespaceQuota.__struct_fields__
    taken = [name for name in fields if all(getattr(own, name) == getattr(of_team, name) for own, of_team in pairs)]
    return msgspec.structs.replace(will, **{name: getattr(was, name) for name in taken})


def outline(old: Quota, new: Quota, longest: int) -> str:
    """Return a text with the first differences. ``longest``: its maximum length, at least `MAX_CHANGE_LENGTH` + 40."""
    text, different = "", changes(old, new)
    for change in different:
        longer = f"{text}; {change.shown}" if text else change.shown
        if len(longer) + _ROOM_FOR_MORE > longest:
            return f"{text}; {1 + sum(1 for _ in different)} more changes are not listed"
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
    for name in sorted(was.excepted ^ will.excepted):
        yield QuotaChange(f"{namespace}.except", *(name, "") if name in was.excepted else ("", name))


def weakened(old: Quota, new: Quota) -> Iterator[Fault]:
    """Yield a warning for each entry that is removed, that becomes less strict, or that excepts more namespaces."""
    after = new.entries
    for namespace, was in old.entries.items():
        if (will := after.get(namespace)) and namespace in new.namespaces:
            will = _apart_from_team(namespace, (old, was), (new, will))
        if will is None and namespace.startswith(team_path("")):
            yield Fault(namespace, f"the team ({_entry(was)}) is removed")
        elif will is None:
            instead = "No limit applies any more" if namespace == DEFAULT else _instead(namespace, new)
            yield Fault(namespace, f"the entry ({_entry(was)}) is removed. {instead}")
        elif will.mode.is_softer_than(was.mode):
            yield Fault(f"{namespace}.mode", f"the mode changes from {was.mode} to {will.mode}")
        if will and was.total and will.total is None:
            yield Fault(f"{namespace}.{TOTAL}", f"the limit of all models together ({was.total}) is removed")
        if will and (added := sorted(will.excepted - was.excepted)):
            names = listed(added, MAX_EXCEPTED_SHOWN)
            yield Fault(f"{namespace}.except", f"the entry does not apply any more to {names}")


def without_team(old: Quota, new: Quota, existing: Collection[str] | None) -> Iterator[Fault]:
    """Yield a warning if namespaces are in no team any more, because a team, or its name or beginning, is removed.

    ``existing``: the names of all namespaces; None if they are unknown. Then the warning names the removed items.
    """
    if old.members == new.members:
        return
    if existing is None:
        items = (item for items in old.members.items.values() for item in items)
        left = [item for item in items if new.members.team_of(item.removesuffix("*")) is None]
    else:
        left = [name for name in existing if old.members.team_of(name) and new.members.team_of(name) is None]
    if left:
        count = "" if existing is None else f"{len(left)} "
        subject = "namespace loses the limits of its" if len(left) == 1 else "namespaces lose the limits of their"
        yield Fault(TEAMS, f"{count}{subject} team: {listed(sorted(left), MAX_EXCEPTED_SHOWN)}")


def moved(old: Quota, new: Quota, namespaces: Iterable[str]) -> list[str]:
    """Return those of the namespaces that are in another team after the edit, in alphabetical order."""
    return sorted(name for name in namespaces if old.members.team_of(name) != new.members.team_of(name))


def moves(namespace: str, old: Quota, new: Quota, used: Mapping[str, Charge] | None) -> Iterator[Fault]:
    """Yield a warning if a namespace brings usage into another team, or takes usage out of a team.

    ``used``: the usage by GPU model; None if it is unknown. The edit must change the team of the namespace.
    """
    was, will = old.members.team_of(namespace), new.members.team_of(namespace)
    cards_of = ", ".join(f"{charge} of {model}" for model, charge in (used or {}).items() if charge != Charge())
    if will is None:
        with_cards = f" with {cards_of}" if cards_of else ""
        yield Fault(namespace, f"leaves team {was}{with_cards}. {_instead(namespace, new)}")
    elif cards_of or used is None:
        text = f"joins team {will}" if was is None else f"moves from team {was} to team {will}"
        yield Fault(namespace, f"{text} and brings {cards_of or 'an unknown usage'}")


def _instead(namespace: str, new: Quota) -> str:
    entry = new.for_namespace(namespace)
    if entry is None:
        return "No limit applies any more"
    if entry.team:
        return f"The limits of team {entry.team.name} apply instead"
    return f'The entry "{namespace if namespace in new.namespaces else DEFAULT}" applies instead'


def above_team(quota: Quota) -> Iterator[Fault]:
    """Yield a warning for each limit of an entry that exceeds the limit of the team, with all grants of the team."""
    for namespace, entry in quota.namespaces.items():
        name = quota.members.team_of(namespace)
        if name is None:
            continue
        team, most = quota.teams[name], _most_cores(quota.teams[name], quota.moment)
        compared = [(f"quota.{model}", limit, most[model]) for model, limit in entry.limits.items()]
        if entry.total and team.total:
            compared.append((TOTAL, entry.total, team.total.most_cores))
        for key, limit, of_team in compared:
            if limit.most_cores > of_team:
                text = f"the limit of {limit} has no effect, because team {name} has {cards(of_team)}"
                yield Fault(f"{namespace}.{key}", text)


def ineffective_total(namespace: str, entry: NamespaceQuota, moment: float | None) -> Iterator[Fault]:
    """Yield a warning if the limits of the models, with all grants, permit no more cards than the key `total`."""
    if entry.total and all(limit.cores is not None for limit in entry.at(None).limits.values()):
        permitted = sum(_most_cores(entry, moment).values())
        if permitted <= entry.total.most_cores:
            sums = f"the limits of all models add up to {cards(permitted)}"
            yield Fault(f"{namespace}.{TOTAL}", f"the limit of {entry.total} has no effect, because {sums}")


def grouped(warnings: Iterable[Fault]) -> list[str]:
    """Return the texts of the warnings, with one line for those that differ only in the field of the document."""
    fields: dict[str, list[str]] = {}
    for path, text in warnings:
        fields.setdefault(text, []).extend([path] if path else [])
    return [str(Fault(listed(found, MAX_FIELDS) if found else "", text)) for text, found in fields.items()]


def beyond(old: Quota, new: Quota, cards_of: Mapping[str, int]) -> Iterator[Fault]:
    """Yield a warning if an edit raises a limit, or the sum of a model's limits, above the number of existing cards."""
    before, after = ({name: _most_cores(each, new.moment) for name, each in of.entries.items()} for of in (old, new))
    for namespace, limits in after.items():
        team = new.members.team_of(namespace) if namespace in new.namespaces else None
        of_team = after[team_path(team)] if team else {}
        for model, limit in limits.items():
            was = before.get(namespace, {}).get(model, 0)
            if limit == of_team.get(model):
                continue  # The team has the same limit, and gets the warning.
            if model in cards_of and limit > max(was, cards_of[model] * CORES_PER_CARD):
                granted = any(model in each.limits for each in new.entries[namespace].grants)
                subject = f"the limit{' with all grants' if granted else ''}"
                yield Fault(f"{namespace}.quota.{model}", _beyond(subject, was, limit, cards_of[model]))
    # The limits of a team's members are not added, because all members together have the limits of the team.
    was_added, is_added = (
        [limits for name, limits in each.items() if of.members.team_of(name) is None]
        for of, each in ((old, before), (new, after))
    )
    for model in sorted(cards_of):
        was_sum, is_sum = (sum(limits.get(model, 0) for limits in each) for each in (was_added, is_added))
        if is_sum > max(was_sum, cards_of[model] * CORES_PER_CARD):
            yield Fault(model, _beyond("the sum of all limits", was_sum, is_sum, cards_of[model]))


def _beyond(subject: str, was: int, will: int, present: int) -> str:
    available = cards(present * CORES_PER_CARD)
    return f"{subject} is raised from {cards(was)} to {cards(will)}, but the nodes have {available}"


def _most_cores(entry: NamespaceQuota, moment: float | None) -> dict[str, int]:
    """Return the limit of each model plus all grants that have not ended, in hundredths of a card."""
    # All grants are added, even grants that never apply at the same time. To find such grants would take too long.
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
    if entry.total:
        limits = f"{limits}, {TOTAL}: {entry.total}"
    if entry.excepted:
        limits = f"{limits}, except {listed(sorted(entry.excepted), MAX_EXCEPTED_SHOWN)}"
    return limits if entry.mode is Mode.ENFORCE else f"{entry.mode}, {limits}"


def _limit(entry: NamespaceQuota, model: str) -> str:
    return str(entry.limits[model]) if model in entry.limits else ""


def _limits(limits: Mapping[str, Limit]) -> str:
    return ", ".join(f"{model}: {limit}" for model, limit in limits.items())


def _plain(value: object) -> str:
    if value is None or isinstance(value, Limit):
        return str(value or "")
    if isinstance(value, tuple) and value and all(isinstance(each, Grant) for each in value):
        return "; ".join(f"{_limits(each.limits)} {each.times}" for each in value)
    if isinstance(value, frozenset):
        value = sorted(value)
    return msgspec.json.encode(value, enc_hook=str).decode()
