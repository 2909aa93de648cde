"""Adds the memory of one GPU card to those limits in the quota document that limit only memory, and not cards::

    gpu_quota:   team-i: {quota: {A100: {memory: 160Gi}}}
    gpu_models:  A100: {memory: 80Gi}                       # a whole card takes 80Gi of the limit

Under such a limit, a request for whole cards is charged the memory of these cards. So the key ``gpu_models`` must state
the memory of one card. The memory of the cards on the nodes is not used, because these cards may differ or disappear.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from vcuda.errors import Fault, QuotaFault
from vcuda.quota.document import path_of
from vcuda.quota.model import DEFAULT, Limit, NamespaceQuota, Quota
from vcuda.quota.well_known import TEAMS
from vcuda.quota.yaml import KeyPath

_MemoryOf = Callable[[str], int]
"""A function that returns the memory of one card of a GPU model in MiB; 0 if ``gpu_models`` does not state it."""


def with_card_memory(quota: Quota, memory_of: _MemoryOf) -> Quota:
    """Return the quota, with the memory of one card of the model added to each limit that limits only memory.

    Raises QuotaFault if ``gpu_models`` does not state the memory of such a card.
    """
    faults: list[Fault] = []

    def stated(path: KeyPath, limits: Mapping[str, Limit]) -> Mapping[str, Limit]:
        alone = [model for model, limit in limits.items() if limit.cores is None]
        faults.extend(_missing((*path, model), model) for model in alone if not memory_of(model))
        return {**limits, **{model: Limit(None, limits[model].memory, memory_of(model)) for model in alone}}

    def priced(entry: NamespaceQuota, *path: str) -> NamespaceQuota:
        limits = stated((*path, "quota"), entry.limits)
        grants = (
            replace(each, limits=stated((*path, "grants", at), each.limits)) for at, each in enumerate(entry.grants)
        )
        return replace(entry, limits=limits, grants=tuple(grants))

    def priced_member(name: str, entry: NamespaceQuota) -> NamespaceQuota:
        team = quota.members.team_of(name)
        of_team = quota.teams[team] if team else None
        if team is None or of_team is None or (entry.limits, entry.grants) != (of_team.limits, of_team.grants):
            return priced(entry, name)
        # The entry has the limits of its team, so the faults name the team.
        return replace(entry, limits=teams[team].limits, grants=teams[team].grants)

    teams = {name: priced(team, TEAMS, name) for name, team in quota.teams.items()}
    namespaces = {name: priced_member(name, entry) for name, entry in quota.namespaces.items()}
    default = priced(quota.default, DEFAULT) if quota.default else None
    if faults:
        raise QuotaFault(tuple(faults))
    return replace(quota, default=default, namespaces=namespaces, teams=teams)


def _missing(path: KeyPath, model: str) -> Fault:
    return Fault(
        path_of(path),
        f"must have `cards`, because `gpu_models` does not state the memory of one {model} card. "
        f"Alternatively, add the memory to `gpu_models`, for example {model}: {{memory: 80Gi}}",
    )
