"""Checks the quota document, which people write into the quota ConfigMap, and converts it to a Quota.

The document is JSON or YAML in gpu-admission's format (``pkg/predicate/gpu_predicate.go``), with extensions::

    team-a: {pool: [public], quota: {M40: 8, P100: 2.5}}   # cards, with at most two decimals
    team-b: {quota: {A100: {cards: 4, memory: 160Gi}}}     # no pool: every pool
    team-i: {quota: {A100: {memory: 160Gi}}}               # memory alone, see vcuda.quota.card_memory
    team-c: {mode: warn, quota: {M40: 8}}                  # enforce (default), warn or audit
    team-d: {allow: [privileged], quota: {M40: 8}}         # admits privileged containers, which see all cards
    team-e: {order: [A100, T4], quota: {T4: 8, A100: 2}}   # A100 first; the default is the order in `quota`
    team-g: {one_model: true, quota: {T4: 8, A100: 2}}     # pods that could get both models are rejected
    team-j: {require_nodes: true, quota: {T4: 8}}          # no model without nodes; at the top: for all entries
    team-k: {total: 8, quota: {T4: 8, A100: 4}}            # at most 8 cards of both models together
    team-h: {grants: [{T4: 8, weekly: Sat-Sun}]}           # more at certain times, see vcuda.quota.grant_entries
    "*":    {quota: {}, except: ["longhorn-*"]}            # every namespace without its own entry, but not these

As in gpu-admission, an absent or null ``quota`` allows no model. An absent, null or empty ``pool`` allows every pool.

Everything that could hide a mistake is a fault: an unknown or repeated key, a number in quotes or out of bounds, a
model or pool that is not a valid label value, and an invalid name of a namespace. An entry with an invalid name would
never apply. For example, ``A`` and ``B`` in the example of gpu-admission are invalid, because they are upper-case.
"""

import itertools
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

import pydantic
from msgspec.structs import replace
from pydantic_core import ErrorDetails

from vcuda import errors
from vcuda.quota import teams as team_entries
from vcuda.quota.entries import NamespaceEntry, QuotaEntry
from vcuda.quota.grant_entries import MAX_RECURRING
from vcuda.quota.model import DEFAULT, NamespaceQuota, Quota
from vcuda.quota.teams import TeamEntry
from vcuda.quota.times import UTC
from vcuda.quota.values import LimitEntry, WrongValueError, printable, raise_faults, sentence
from vcuda.quota.well_known import NAMESPACE_RULE, SYSTEM_NAMESPACES, is_namespace_name
from vcuda.quota.yaml import KeyPath, PathFault, Plain, read_content

T = TypeVar("T")

MAX_NAMESPACES = 10_000
"""The most namespaces in one document. Kubernetes itself is tested with 10,000 namespaces."""
MAX_EMPTY_LENGTH = 256
"""`is_empty` parses only texts of at most this many characters without comments. A longer text is not empty."""
ONLY_DEFAULT = f'must be set only in the entry "{DEFAULT}"'
REQUIRE_NODES = "require_nodes"
"""A key of an entry. At the top of the document, where no namespace can have this name, it is for all entries."""


def read_namespace_name(name: str) -> str:
    # If an invalid namespace name were accepted, its quota entry would never apply, and nobody would notice.
    if name != DEFAULT and not is_namespace_name(name):
        raise WrongValueError(f"{NAMESPACE_RULE}. The entry `*` applies to every namespace without its own entry")
    return name


_DOCUMENT = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(read_namespace_name)], NamespaceEntry])

_KEY = "[key]"
"""The text that pydantic appends to the path of a fault if the key of a mapping is invalid."""


def check_text(text: str, read: Callable[[Plain], T], sentence_of: Callable[[ErrorDetails], str]) -> T:
    """Parse a YAML or JSON text, convert its content with the function ``read``, and return the result. ``sentence_of``
    returns the message for a fault that pydantic has found. Raises QuotaFault with all faults."""
    tree, faults = read_content(text)
    try:
        found = read({} if tree is None else tree)
    except pydantic.ValidationError as error:
        for details in error.errors(include_url=False):
            path = details["loc"]
            faults += ((path[:-1] if path[-1:] == (_KEY,) else path, sentence_of(details)),)
    if faults:
        raise errors.QuotaFault(_in_document_order(tree, faults))
    return found


def _sentence_of(entry: type[QuotaEntry], shapes: tuple[str, ...]) -> Callable[[ErrorDetails], str]:
    """Return the function that makes messages about faults in a document of such entries."""

    def sentence_of(details: ErrorDetails) -> str:
        depth = len(details["loc"])
        if depth > len(("namespace", "quota", "model")):
            return sentence(details, LimitEntry, _SHAPES[-1])
        return sentence(details, entry, (*shapes, *_SHAPES)[min(depth, 3)], "GPU models must be listed in `quota`")

    return sentence_of


_SHAPES = (
    "must be a mapping from models to cards, for example {A100: 8, T4: 2.5}",
    "must be a mapping with models and times, for example {A100: 4, until: 2026-12-01}",
)
"""The error messages if the key ``quota`` of an entry, or one of its grants, is not a mapping."""

_ENTRY_SHAPES = (
    "must be a mapping with one entry per namespace, for example team-a: {quota: {A100: 8}}",
    "must be a mapping, for example {quota: {A100: 8}}",
)
"""The error messages if the document, or the entry of a namespace, is not a mapping."""


def _in_document_order(tree: Plain, faults: tuple[PathFault, ...]) -> tuple[errors.Fault, ...]:
    # The faults of the YAML parser and of pydantic are sorted together, because people correct a document from the top.
    order = {path: at for at, path in enumerate(_paths(tree, ()))}
    ordered = sorted(faults, key=lambda fault: order.get(fault[0], order.get(fault[0][:-1], 0)))
    return tuple(errors.Fault(path_of(path), message) for path, message in ordered)


def _paths(tree: Plain, path: KeyPath) -> Iterator[KeyPath]:
    yield path
    children: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


_SIMPLE_KEY = re.compile(r"[-_*A-Za-z0-9]+")


def path_of(path: KeyPath) -> str:
    """Return the path of a value as text, for example ``team-a.quota.V100.cards``."""
    # In the returned path, brackets enclose a position in a list, or a key with characters such as dots.
    text = ""
    for step in path:
        if isinstance(step, str) and _SIMPLE_KEY.fullmatch(step):
            text += f".{printable(step)}" if text else printable(step)
        else:
            text += f"[{printable(str(step))}]"
    return text


def _read_entries(
    tree: Plain, zone: ZoneInfo, teams: Mapping[str, TeamEntry] | None
) -> tuple[bool, Mapping[str, NamespaceEntry]]:
    """Return the key ``require_nodes`` at the top of the document, and the entries by namespace."""
    if isinstance(tree, dict) and len(tree) > MAX_NAMESPACES:
        raise errors.QuotaFault(
            (errors.Fault("", f"the document must not have more than {MAX_NAMESPACES} namespaces; got {len(tree)}"),)
        )
    required: object = False
    if isinstance(tree, dict) and REQUIRE_NODES in tree:
        required = tree[REQUIRE_NODES]
        tree = {name: entry for name, entry in tree.items() if name != REQUIRE_NODES}
        raise_faults([((REQUIRE_NODES,), "must be true or false")] if not isinstance(required, bool) else ())
    entries = _DOCUMENT.validate_python(tree)
    misplaced = (
        ((name, "except"), ONLY_DEFAULT) for name, each in entries.items() if each.excepted and name != DEFAULT
    )
    raise_faults(itertools.chain(misplaced, _entry_faults(entries, zone, teams)))
    return bool(required), entries


def _entry_faults(
    entries: Mapping[str, NamespaceEntry], zone: ZoneInfo, teams: Mapping[str, TeamEntry] | None
) -> Iterator[tuple[KeyPath, str]]:
    known = teams or {}
    members = team_entries.members_of(known)
    for name, entry in entries.items():
        if teams is None and "quota" not in entry.model_fields_set:
            continue  # Without the teams, it is not known which models the entry may name.
        if (team := members.team_of(name)) is None:
            found = entry.faults(zone)
        else:
            without_limits = "quota" not in entry.model_fields_set
            models = team_entries.models_of(known[team]) if without_limits else ()
            found = itertools.chain(
                entry.faults(known[team].time_zone or zone, models), team_entries.entry_faults(entry, team, known[team])
            )
        for path, why in found:
            yield (name, *path), why


def is_empty(text: str) -> bool:
    """Return whether a YAML text is blank, or has only comments or a null."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    # A long text is treated as not empty without parsing it here, because the caller parses the text anyway.
    rest = "\n".join(lines).strip()
    try:
        return len(rest) <= MAX_EMPTY_LENGTH and read_content(rest)[0] is None
    except errors.QuotaFault:
        return False


def parse_teams(text: str, system: frozenset[str] = SYSTEM_NAMESPACES, zone: ZoneInfo = UTC) -> Mapping[str, TeamEntry]:
    """Parse the teams of a quota document. ``system``: the namespaces that may not belong to a team.
    ``zone``: the default time zone of grants. Raises QuotaFault."""
    sentence_of = _sentence_of(TeamEntry, team_entries.TEAM_SHAPES)
    return check_text(text, lambda tree: team_entries.read_teams(tree, system, zone), sentence_of)


def parse_quota(
    text: str,
    system: frozenset[str] = SYSTEM_NAMESPACES,
    zone: ZoneInfo = UTC,
    teams: Mapping[str, TeamEntry] | None = types.MappingProxyType({}),
) -> Quota:
    """Parse a quota document. ``system``: the namespaces to which the entry ``*`` never applies.
    ``zone``: the default time zone of grants. ``teams``: from `parse_teams`; None if they are
    malformed. Raises QuotaFault."""
    required, entries = check_text(
        text, lambda tree: _read_entries(tree, zone, teams), _sentence_of(NamespaceEntry, _ENTRY_SHAPES)
    )

    def read(entry: QuotaEntry, zone: ZoneInfo) -> NamespaceQuota:
        found = entry.as_quota(zone)
        return found if REQUIRE_NODES in entry.model_fields_set else replace(found, require_nodes=required)

    teams = teams or {}
    members = team_entries.members_of(teams)
    limits = {name: read(team, zone) for name, team in teams.items()}
    namespaces = {}
    for name, entry in entries.items():
        team = members.team_of(name)
        own = read(entry, (team and teams[team].time_zone) or zone)
        own = replace(own, excepted=frozenset(entry.excepted))
        namespaces[name] = team_entries.joined(entry, own, limits[team]) if team else own
    default = namespaces.pop(DEFAULT, None)
    quota = Quota(namespaces, default, system, teams=limits, members=members)
    if (recurring := sum(each.recurs for each in quota.times)) > MAX_RECURRING:
        message = f"the grants must not have more than {MAX_RECURRING} different weekly or daily times; got {recurring}"
        raise errors.QuotaFault((errors.Fault("", message),))
    return quota
