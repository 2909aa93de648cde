"""Checks the teams of a quota document: groups of namespaces that share one limit of each GPU model::

    gpu_teams: |
      vision: {namespaces: [vision-train, "vision-dev-*"], quota: {A100: 8, T4: {cards: 16, memory: 256Gi}}, total: 20}

A team has all keys of a quota entry except ``except``. A member may also have a quota entry. Then the limits of both
hold. A key that the entry lacks has the value of the team. The entry may have only models of the team, and no softer
mode.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import pydantic
from msgspec.structs import replace

from vcuda import errors
from vcuda.quota.entries import NamespaceEntry, QuotaEntry, names, namespace_items
from vcuda.quota.membership import Members
from vcuda.quota.model import NamespaceQuota, Quota
from vcuda.quota.values import WrongValueError, listed, raise_faults
from vcuda.quota.well_known import NAMESPACE_RULE, is_namespace_name, team_path
from vcuda.quota.yaml import KeyPath, Plain

MAX_TEAMS = 1000
"""The most teams in one document."""
MAX_ITEMS = 500
"""The most names and beginnings of names in the key ``namespaces`` of a team."""
MAX_MODELS_SHOWN = 10
"""The most models in one message."""

INHERITED = {
    "pool": "pools",
    "mode": "mode",
    "allow": "allow",
    "order": "order",
    "one_model": "one_model",
    "require_nodes": "require_nodes",
}
"""The keys that a member's entry has from its team if it lacks them, with the fields of `NamespaceQuota`."""


def _read_team_name(name: str) -> str:
    if not is_namespace_name(name):
        raise WrongValueError(NAMESPACE_RULE.replace("a namespace", "a team"))
    return name


def _counted(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(items) > MAX_ITEMS:
        raise WrongValueError(f"must not have more than {MAX_ITEMS} names; got {len(items)}")
    return items


class TeamEntry(QuotaEntry):
    """One team."""

    namespaces: Annotated[
        tuple[namespace_items("vision-dev-*"), ...],  # type: ignore[valid-type]
        names("vision-train"),
        pydantic.AfterValidator(_counted),
    ] = ()


_TEAMS = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(_read_team_name)], TeamEntry])

TEAM_SHAPES = (
    "must be a mapping with one entry per team, for example vision: {namespaces: [vision-train], quota: {A100: 8}}",
    "must be a mapping, for example {namespaces: [vision-train], quota: {A100: 8}}",
)
"""The error messages if the document of the teams, or a team, is not a mapping."""


def read_teams(tree: Plain, system: Collection[str], zone: ZoneInfo) -> Mapping[str, TeamEntry]:
    """Return the teams, by name. ``system``: the namespaces that belong to no team. ``zone``: the default time zone of
    grants. Raises QuotaFault, or pydantic's ValidationError."""
    if isinstance(tree, dict) and len(tree) > MAX_TEAMS:
        raise errors.QuotaFault(
            (errors.Fault("", f"the document must not have more than {MAX_TEAMS} teams; got {len(tree)}"),)
        )
    teams = _TEAMS.validate_python(tree)
    raise_faults(_faults(teams, system, zone))
    return teams


def _faults(teams: Mapping[str, TeamEntry], system: Collection[str], zone: ZoneInfo) -> Iterator[tuple[KeyPath, str]]:
    first: dict[str, str] = {}
    for name, team in teams.items():
        if not team.namespaces:
            yield (name, "namespaces"), 'must have at least one namespace, for example [vision-train, "vision-dev-*"]'
        for at, item in enumerate(team.namespaces):
            path = (name, "namespaces", at)
            if matched := _matched(item, system):
                yield path, f"must not match the system namespace {matched}"
            if item in teams and item != name:
                yield path, f"must not be the name of another team, because a team has no teams; see {team_path(item)}"
            elif item in first:
                yield path, f"duplicate namespace {item}; {first[item]} lists it too"
            first.setdefault(item, f"{team_path(name)}.namespaces[{at}]")
        for below, why in team.faults(zone):
            yield (name, *below), why


def _matched(item: str, system: Collection[str]) -> str | None:
    """Return a system namespace to which an item of a team applies; None if there is none."""
    applies = str.startswith if item.endswith("*") else str.__eq__
    return min((each for each in system if applies(each, item.removesuffix("*"))), default=None)


def members_of(teams: Mapping[str, TeamEntry]) -> Members:
    return Members({name: team.namespaces for name, team in teams.items()})


def entry_faults(entry: NamespaceEntry, name: str, team: TeamEntry) -> Iterator[tuple[KeyPath, str]]:
    """Yield the faults of a member's entry that contradict the team, as pairs of a path and a message."""
    in_team, models = team_path(name), models_of(team)
    written = entry.model_fields_set
    if "mode" in written and entry.mode.is_softer_than(team.mode):
        yield ("mode",), f"must not be less strict than {in_team}.mode, which is {team.mode}; got {entry.mode}"
    if "grants" in written and "quota" not in written:
        yield ("grants",), f"must not be set without `quota`, because the entry has the limits of {in_team}.quota"
    named: list[tuple[KeyPath, Any]] = [(("quota",), entry.quota)]
    named += [(("grants", at), grant.limits) for at, grant in enumerate(entry.grants)]
    for path, limits in named:
        for model in limits:
            if model not in models:
                supported = listed(models, MAX_MODELS_SHOWN)
                yield (*path, model), f"must be a model of {in_team}.quota; supported models: {supported}"


def models_of(team: TeamEntry) -> Collection[str]:
    """Return the models in the limits and grants of a team, in the order of the document."""
    return dict.fromkeys((*team.quota, *(model for grant in team.grants for model in grant.limits)))


def joined(entry: NamespaceEntry, own: NamespaceQuota, team: NamespaceQuota) -> NamespaceQuota:
    """Return the quota of a member's entry, with the values of the team for the keys that the entry lacks."""
    written = entry.model_fields_set
    taken: dict[str, Any] = {field: getattr(team, field) for key, field in INHERITED.items() if key not in written}
    if "quota" not in written:
        taken |= {"limits": team.limits, "grants": team.grants, "total": own.total or team.total}
    joint = replace(own, **taken)
    return replace(joint, order=tuple(model for model in joint.order if model in joint.at(None).limits))


def has_own_limits(quota: Quota, path: str) -> bool:
    """Return False if an entry of the quota has the limits and grants of its team. ``path``: its key in `entries`."""
    team, entry = quota.members.team_of(path), quota.namespaces.get(path)
    return (
        team is None
        or entry is None
        or any(getattr(entry, field) != getattr(quota.teams[team], field) for field in ("limits", "grants", "total"))
    )
