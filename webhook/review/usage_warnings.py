"""Compares an edited quota with the present usage, for the warnings to its author."""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from vcuda import errors, k8s_types
from vcuda.errors import Fault
from vcuda.quota import changes
from vcuda.quota.model import NO_LIMIT, Charge, NamespaceQuota, Quota, cards, fits, mebibytes, total
from vcuda.quota.teams import has_own_limits
from vcuda.quota.well_known import TOTAL, team_path
from webhook.ledger import charging

# The changed entries of an edit are compared with the current usage for at most COMPARING_SECONDS. An edit may change
# thousands of entries, and a tenant can make the ledger of a namespace slow. Without these bounds, such an edit would
# exceed the API server's timeout at every attempt, although the comparison only gives warnings. READING_SECONDS: the
# time for one ledger, so that a slow ledger leaves time for the others.
COMPARING_SECONDS, READING_SECONDS = 1.0, 0.25

_Used = dict[str, Charge]
"""The usage by GPU model."""


async def usage_warnings(
    old: Quota | None,
    new: Quota,
    existing: Collection[str] | None,
    charged: charging.Ledgers,
    check: k8s_types.Check,
) -> list[Fault]:
    """Return warnings about changed limits below the usage, and about namespaces that change their team.

    ``old``: the quota before the edit; None if it is unknown. ``existing``: the names of all namespaces; None if
    they are unknown. Then only the members that a team lists by their name are compared with its limits.
    """
    existing = new.named if existing is None else existing
    before = old or Quota()
    entries = {name: entry for name, entry in new.namespaces.items() if has_own_limits(new, name)}
    changed = [name for name, entry in entries.items() if before.namespaces.get(name) != entry]
    moved = changes.moved(old, new, existing) if old else []
    teams = {name for name, team in new.teams.items() if before.teams.get(name) != team}
    teams |= {team for name in moved if (team := new.members.team_of(name))}
    members = {name: team for name in existing if (team := new.members.team_of(name)) in teams}
    usages, faults = await _read(dict.fromkeys((*changed, *moved, *members)), charged, check)
    for name in moved:
        faults += changes.moves(name, before, new, usages.get(name))
    for name in changed:
        faults += _below_use(name, new.namespaces[name].at(new.moment), usages.get(name, {}))
    for team in sorted(teams):
        sums: _Used = defaultdict(Charge)
        for name in (name for name, its_team in members.items() if its_team == team):
            for model, used in usages.get(name, {}).items():
                sums[model] += used
        faults += _below_use(team_path(team), new.of_team(team), sums)
    return faults


async def _read(
    namespaces: Collection[str], charged: charging.Ledgers, check: k8s_types.Check
) -> tuple[Mapping[str, _Used], list[Fault]]:
    """Return the usage of each namespace whose ledger could be read in time, and the warnings about the others."""
    # If there are many warnings, the last ones are not shown. So the warning that some namespaces were not compared
    # comes first.
    deadline = time.monotonic() + COMPARING_SECONDS
    found: dict[str, _Used] = {}
    faults: list[Fault] = []
    for done, namespace in enumerate(namespaces):
        if (seconds := deadline - time.monotonic()) <= 0:
            text = "the usage could not be read in time; namespaces not compared with the usage: "
            return found, [Fault("", f"{text}{len(namespaces) - done}"), *faults]
        check()
        try:
            usages = await charged.usage(namespace, None, min(seconds, READING_SECONDS))
        except (errors.Unavailable, errors.UnreadableLedger, errors.LedgerLost) as error:
            faults.append(Fault(namespace, f"the quota was not compared with the current usage: {error}"))
        else:
            found[namespace] = {model: usage.in_use for model, usage in usages.items()}
    return found, faults


def _below_use(path: str, entry: NamespaceQuota, used: _Used) -> Iterator[Fault]:
    compared = [(f"quota.{model}", entry.limits.get(model, NO_LIMIT), charge) for model, charge in used.items()]
    if entry.total:
        compared.append((TOTAL, entry.total, total(used.values())))
    for key, limit, charge in compared:
        if not fits(limit, Charge(), charge):
            in_use = "" if limit.memory is None else mebibytes(charge.memory_under(limit))
            in_use = in_use if limit.cores is None else ", ".join(filter(None, (cards(charge.cores), in_use)))
            text = f"the limit is {limit}, but the usage is {in_use}; new pods are rejected until less is in use"
            yield Fault(f"{path}.{key}", text)
