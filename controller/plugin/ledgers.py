"""Checks for ``kubectl gpuquota doctor`` of the ledgers of all namespaces and teams."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from controller.plugin.defects import MAX_NAMES, Defect
from controller.plugin.installation import Installation
from vcuda.kube.ledger_store import NAMESPACE_LABEL, ledger_name
from vcuda.kube.team_store import team_ledger_name
from vcuda.ledger.team import read_team_ledger
from vcuda.ledger.text import FORMAT, OtherFormat, read_ledger
from vcuda.quota.values import listed

Unread = dict[str, tuple[str, Exception]]
"""The ledgers that cannot be read, by the name of the ConfigMap: the owner, and the error."""

_Ledger = TypeVar("_Ledger")
_WAIT = "Wait 90 s, and run this command again: the ledger is rebuilt from the stored pods"
_ONE_RELEASE = "Update all parts to one release. The check `versions` names the parts that differ"


def ledger_defects(seen: Installation) -> Iterator[Defect | str]:
    """Yield the ledgers that are closed, that were deleted, or that cannot be read."""
    found, unread = seen.ledgers, Unread()
    for namespace, text in found.texts.items():
        ledger = _read(ledger_name(namespace), f"namespace {namespace}", text, read_ledger, unread)
        if ledger and ledger.lost is not None:
            yield Defect(f"the ledger of namespace {namespace} is closed, because an earlier one was lost", _WAIT)
    for namespace in sorted(found.marked - {*found.texts}):
        if seen.limits(namespace):
            yield Defect(f"the ledger of namespace {namespace} was deleted", _WAIT)
    for team, text in found.teams.items():
        of_team = _read(team_ledger_name(team), f"team {team}", text, read_team_ledger, unread)
        if of_team and of_team.closed:
            yield _closed(team, sorted(each for each in found.members.get(team, ()) if ledger_name(each) in unread))
    yield from _unreadable(seen, unread)
    yield f"all {len(found.texts) + len(found.teams)} ledgers are open"


def _read(name: str, owner: str, text: str, decode: Callable[[str], _Ledger], unread: Unread) -> _Ledger | None:
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:
        unread[name] = owner, error
        return None


def _closed(team: str, members: list[str]) -> Defect:
    """Return the fault that a team's ledger is closed. ``members``: those whose ledgers cannot be read."""
    text = f"the ledger of team {team} is closed, so its namespaces can use no more than what they have been allotted"
    if not members:
        return Defect(text, _WAIT)
    keeping = f"{text}. It stays closed while the ledgers of these namespaces cannot be read"
    return Defect(f"{keeping}: {listed(members, MAX_NAMES)}", "Repair these ledgers as another line of this check says")


def _unreadable(seen: Installation, unread: Unread) -> Iterator[Defect]:
    delete, others = f"kubectl -n {seen.place.ledger_namespace} delete configmaps", dict[str, str]()
    for name, (owner, error) in unread.items():
        if isinstance(error, OtherFormat):
            others[name] = owner
        else:
            yield Defect(f"the ledger of {owner} cannot be read: {error}", f"{delete} {name}")
    if others:
        text = f"another release wrote these ledgers, and this release reads only format {FORMAT}"
        names = " ".join(others) if len(others) <= MAX_NAMES else f"-l {NAMESPACE_LABEL}"
        # The ledgers are deleted only if no part reads them.
        rebuilt = f"Delete the ledgers, which are then counted again from the stored pods: {delete} {names}"
        differ = len({*seen.images.values(), *seen.template_images().values()}) > 1
        yield Defect(f"{text}: {listed([*others.values()], MAX_NAMES)}", _ONE_RELEASE if differ else rebuilt)
