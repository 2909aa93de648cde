"""The rows of the tables in which ``kubectl gpuquota`` prints the published usage."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from vcuda.ledger.report import ModelUse, NamespaceUse, PodUse
from vcuda.quota.model import CORES_PER_CARD, Mode

TEAM = "team "
"""The beginning of a team's name in the first column. No namespace has a name with a space."""

BAR = 20
"""The width, in characters, of the bar that shows the used share of a limit."""


def use_rows(use: NamespaceUse) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each GPU model of a namespace, and for all models together if the quota limits them. If the
    namespace has no model, yield one row.

    The first column has the namespace's name, followed by notes in parentheses, such as the team and the mode.
    """
    found = {
        f"{TEAM}{use.team.name}" if use.team else "": use.team is not None,
        use.mode: use.mode != Mode.ENFORCE,
        "not in effect": bool(use.unregistered),
        "taking effect": use.taking_effect and not use.unregistered,
        "ledger lost": use.ledger_lost,
    }
    notes = ", ".join(note for note, holds in found.items() if holds)
    namespace = f"{use.namespace} ({notes})" if notes else use.namespace
    for each in use.limits:
        yield _row(namespace, each)
    if not use.models:
        yield (namespace, "no GPU", *[""] * 8)


def group_rows(uses: Sequence[NamespaceUse]) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of one namespace, or of namespaces of one team and of the team.

    If there is one namespace, the rows of the team also have the cards that its other namespaces use, as one number.
    """
    for use in uses:
        yield from use_rows(use)
    if team := uses[0].team:
        for each in team.limits:
            name, model, used, *rest = _row(f"{TEAM}{team.name}", each)
            others = f" ({uses[0].used_by_others(each):g} by others)" if len(uses) == 1 else ""
            yield (name, model, f"{used}{others}", *rest)


def by_team(uses: Iterable[NamespaceUse]) -> list[list[NamespaceUse]]:
    """Return the namespaces of each team together, and each other namespace by itself."""

    def key(use: NamespaceUse) -> tuple[str, bool, str]:
        return (use.team.name, True, "") if use.team else (use.namespace, False, use.namespace)

    return [[*group] for _, group in itertools.groupby(sorted(uses, key=lambda use: (key(use), use.namespace)), key)]


def _row(name: str, each: ModelUse) -> tuple[str, ...]:
    figures = (each.used, each.available, each.limit, each.pending, each.reserved)
    used, free, limit, pending, reserved = ("" if cards is None else f"{cards:g}" for cards in figures)
    pending += f" ({each.terminating:g} terminating)" if each.terminating else ""
    memory = "" if each.memory_limit is None else f"{each.memory_used} of {each.memory_limit}"
    reserved += f" ({each.memory_reserved} MiB)" if each.memory_reserved else ""
    shown = (
        bar(each.memory_used or 0, each.memory_limit or 0, each.memory_reserved)
        if each.limit is None
        else bar(each.used, each.limit, each.reserved)
    )
    granted = ", ".join(
        f"{f'{grant.memory} MiB' if grant.cards is None else f'{grant.cards:g}'} until {grant.until}"
        for grant in each.grants
    )
    return (name, each.model, used, free, limit, shown, pending, memory, reserved, granted)


def total_rows(uses: Sequence[NamespaceUse]) -> Iterator[tuple[str, ...]]:
    """Yield a table row with the total of each GPU model that more than one namespace has. The limit of a team counts
    once, and the limits of its namespaces do not.

    If a namespace limits only the memory of the model, the total has no limit in cards.
    """
    for name, group in _by_model(uses):
        if _is_total(group):
            found = [each for _, each in group]
            used, pending = sum(each.used for each in found), sum(each.pending for each in found)
            free, limit = sum(each.available or 0 for each in found), sum(each.limit or 0 for each in found)
            reserved = sum(each.reserved for each in found)
            is_limited = all(each.limit is not None for each in found)
            limits = (f"{free:g}", f"{limit:g}", bar(used, limit, reserved)) if is_limited else ("", "", "")
            yield ("total", name, f"{used:g}", *limits, f"{pending:g}", "", f"{reserved:g}", "")


def total_warnings(uses: Sequence[NamespaceUse]) -> Iterator[str]:
    """Yield a warning for each row of `total_rows` that has no limit."""
    for name, group in _by_model(uses):
        by_memory = [namespace for namespace, each in group if each.limit is None]
        if by_memory and _is_total(group):
            yield (
                f"the row total of {name} shows no limit and no free cards, because these namespaces limit only "
                f"its memory: {', '.join(by_memory)}"
            )


def _by_model(uses: Sequence[NamespaceUse]) -> Iterator[tuple[str, list[tuple[str, ModelUse]]]]:
    pairs = sorted(_shares(uses), key=lambda pair: pair[1].model)
    for name, group in itertools.groupby(pairs, key=lambda pair: pair[1].model):
        yield name, [*group]


def _shares(uses: Sequence[NamespaceUse]) -> Iterator[tuple[str, ModelUse]]:
    """Yield the usage of each namespace, and the limits of each team, by model."""
    for group in by_team(uses):
        team = group[0].team
        for use in group:
            yield from ((use.namespace, replace(each, limit=0, available=0) if team else each) for each in use.models)
        if team:
            yield from ((f"{TEAM}{team.name}", replace(each, used=0, pending=0, reserved=0)) for each in team.models)


def _is_total(group: Sequence[tuple[str, ModelUse]]) -> bool:
    return sum(not name.startswith(TEAM) for name, _ in group) > 1


def holder_rows(use: NamespaceUse) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each pod and claim with cards, and a row with the number of those that the report omits."""
    for each in use.models:
        for holder in each.pods:
            yield (use.namespace, each.model, *holder_cells(holder))
        if each.more_pods:
            yield (use.namespace, each.model, "", f"and {each.more_pods} more", "", "")


def holder_cells(holder: PodUse) -> tuple[str, ...]:
    kind = "claim" if holder.claim else "pod"
    return (kind, holder.name, f"{holder.cores / CORES_PER_CARD:g}", str(holder.memory or ""))


def bar(used: float, limit: float, reserved: float = 0) -> str:
    """Return a bar such as ``[######++----]``, with ``#`` for used and ``+`` for reserved cards.

    The bar is empty only if nothing is used or reserved, and full only if the limit is reached.
    """
    used_to, taken_to = _filled(used, limit), _filled(used + reserved, limit)
    # Even a small number of reserved cards is shown as one ``+`` if the bar has a free place.
    taken_to = max(taken_to, min(used_to + 1, BAR - 1)) if reserved else taken_to
    return f"[{'#' * used_to}{'+' * (taken_to - used_to)}{'-' * (BAR - taken_to)}]"


def _filled(used: float, limit: float) -> int:
    share = used / limit if limit else float(used > 0)
    filled = round(share * BAR) if share < 1 else BAR
    return min(max(filled, 1), BAR - 1) if 0 < share < 1 else filled
