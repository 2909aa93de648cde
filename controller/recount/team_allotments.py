"""Keeps the allotments of teams. An allotment is the part of a team's quota that the ledger of one namespace may use.

docs/team-ledgers.md has the rules. A webhook replica raises an allotment before it admits more. The leader takes back
unused allotments while a team is short of quota, and all allotments of namespaces that have left the team.
"""

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from controller.recount.team_usages import TeamUsages
from controller.workqueue import Reconciler
from vcuda import errors
from vcuda.kube import (
    TEAM_PREFIX,
    LedgerStore,
    NamedLedger,
    QuotaInformer,
    Reflector,
    Stored,
    StoredTeam,
    TeamMap,
    TeamStore,
)
from vcuda.ledger import team as rules
from vcuda.ledger.ledger import Ledger, is_older
from vcuda.ledger.report import TeamUse
from vcuda.ledger.team import MAX_MEMBERS, Allotted, TeamLedger
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Team, total

SHORT_PART = 4
"""A team is short of quota if less than one part in this many of one of its limits is not allotted."""

CROWDED = MAX_MEMBERS * 3 // 4
"""If more namespaces have an allotment, unused allotments are taken back, so that other namespaces can get one."""

CONFLICT_RETRY_SECONDS = 0.2
"""Seconds until the next attempt to take back allotments after a conflict."""

FAILURE_RETRY_SECONDS = 5.0
"""Seconds until the next attempt to take back allotments after another error, for example a LIST that is slow."""

TURN_SECONDS = 1.0
"""The leader takes back allotments of one team for at most this many seconds, so that other teams do not wait."""

LEFT = math.inf
"""The unused part of an allotment whose namespace has left the team. It is taken back even if the team is not short."""


class TeamAllotments:
    """Places the ledgers of namespaces into teams, and raises and lowers their allotments.

    ``exists``: returns False if a namespace seems not to exist. A watch may be late, and the charges of a deleted
    namespace may still run. So only the quota document decides in which team a ledger is.
    ``watched``: the watched ledgers of all namespaces.
    ``ledgers``: the watched ledgers of all teams.
    ``usages``: the usage of all teams, for reports.
    """

    def __init__(
        self,
        store: LedgerStore,
        quota: QuotaInformer,
        exists: Callable[[str], bool],
        watched: Reflector[NamedLedger],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._teams = TeamStore(store)
        self.reconciler = Reconciler(
            "teams", self._reconcile, failure="allotments not taken back", key_name="team", clock=clock
        )
        self.usages = TeamUsages()
        self.ledgers = self._teams.reflector(self.reconciler.queue.add)
        self.watched = watched
        self._store = store
        self._clock = clock
        self._quota = quota
        self._exists = exists
        # `_served`: for each team, the last mark `TeamLedger.wanted` for which unused allotments were taken back.
        self._served: dict[str, str] = {}
        # `_failed`: for each team, the namespaces whose allotments could not be taken back in the last turns.
        self._failed: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def add_all(self) -> None:
        """Queue all teams that the quota has, or that have a ledger."""
        quota = self._quota.current()
        for team in {*(quota.teams if quota else ()), *(each.team for each in self.ledgers.snapshot().values())}:
            self.reconciler.queue.add(team)

    def changed(self, ledger: Ledger, limits: NamespaceQuota | None) -> None:
        """Queue the teams of a namespace whose ledger has changed."""
        for team in {*ledger.allotments, *([limits.team.name] if limits and limits.team else [])}:
            self.reconciler.queue.add(team)

    def report(self, namespace: str, limits: NamespaceQuota, ledger: Ledger) -> TeamUse | None:
        """Record the usage of a namespace, and queue its teams. Return the usage of its team; None if it has none."""
        self.changed(ledger, limits)
        return self.usages.record(namespace, limits.team, ledger.without_fill().usages())

    # The methods that the recounter calls

    def assign(self, namespace: str, stored: Stored) -> Stored:
        """Put the ledger into the team of its namespace by the quota, or into no team. Return the ledger.

        The ledger is written only if it changes.
        """
        quota, name, ledger = self._quota.current(), self._team_of(namespace), stored.ledger
        is_right = name in ledger.allotments if name else not ledger.allotments
        # An older quota moves no namespace, so that processes with different quotas do not move it to and fro.
        if quota is None or is_right or is_older(quota.version, ledger.team_version):
            return stored
        moved = rules.join(ledger, name, quota.version) if name else rules.leave(ledger, quota.version)
        written = self._store.write(namespace, moved, stored)
        self.changed(ledger, None)
        return written

    def cover(self, namespace: str, stored: Stored) -> Stored:
        """Raise the allotment of a namespace if its charges exceed the allotment. Return the ledger.

        The charges exist already: their pods run, although the team may be over its limits. If they do not fit, the
        ledger of the team is closed, and opened by a count of all namespaces. So no namespace uses an allotment that
        was checked before, and the team admits nothing until it is within its limits.
        """
        quota, ledger = self._quota.current(), stored.ledger
        limits = quota.for_namespace(namespace) if quota else None
        team = limits.team if limits else None
        if quota is None or limits is None or team is None or team.name not in ledger.allotments:
            return stored
        recorded = ledger.allotments[team.name].charges
        # A recount counts spent reservations twice: as committed and as reserved. So they alone need no allotment.
        used: Allotted = {model: usage.in_use for model, usage in ledger.without_fill().usages().items()}
        is_covered = len(ledger.allotments) == 1 and rules.covers(recorded, used)
        if is_covered or is_older(quota.version, ledger.team_version):
            return stored
        if len(ledger.allotments) > 1 or not recorded:
            # While a namespace joins, a replica with an older quota may still admit pods from its reservation.
            used = rules.needed(ledger)
        charges: Allotted | None = used
        if used or recorded:
            charges = self._allot(namespace, team, recorded, used, is_enforced=limits.mode == Mode.ENFORCE)
        if charges is None:
            return stored
        # The allotment of an old team ends in this write, because the charges now count in the new team.
        covered = rules.allot(ledger, team.name, charges)
        written = self._store.write(namespace, msgspec.structs.replace(covered, team_version=quota.version), stored)
        self.changed(ledger, None)
        return written

    def _allot(
        self, namespace: str, team: Team, recorded: Allotted, used: Allotted, *, is_enforced: bool
    ) -> Allotted | None:
        """Allot at least ``used`` to a namespace, and return what its ledger may record as allotted.

        ``recorded``: the allotment in its ledger. Return None if the team has too many namespaces. Raises Conflict if
        the ledger of the team was closed and opened, because this writes the namespace's ledger too.
        """
        opened = self._opened(team.name)
        if rules.is_crowded_for(opened.ledger, namespace):
            self._log.warning("too many namespaces in a team", team=team.name, namespace=namespace, limit=MAX_MEMBERS)
            return None
        covered = rules.cover(team, opened.ledger, namespace, recorded=recorded, used=used)
        if covered.fits or not is_enforced:
            self._write(team.name, covered.team, opened)
            return covered.charges
        self._log.info("charges exceed the limit of a team", team=team.name, namespace=namespace)
        self._write(team.name, msgspec.structs.replace(covered.team, closed=secrets.token_urlsafe(6)), opened)
        self._opened(team.name)
        raise errors.Conflict(409, "the ledger of the team was counted again")

    def _team_of(self, namespace: str) -> str:
        """Return the name of a namespace's team; empty if it is in no team."""
        quota = self._quota.current()
        return (quota and quota.members.team_of(namespace)) or ""

    def _write(self, team: str, ledger: TeamLedger, replaced: StoredTeam) -> StoredTeam:
        quota = self._quota.current()
        if quota is None or is_older(quota.version, ledger.config_version):
            raise errors.Unavailable(f"the ledger of team {team} was written by a newer quota than was read")
        return self._teams.write(team, ledger, replaced)

    def _team_map(self) -> TeamMap | None:
        quota = self._quota.current()
        return TeamMap(quota.members.team_of, quota.version) if quota else None

    def _opened(self, team: str) -> StoredTeam:
        """Return the open ledger of a team. If it is closed or missing, open it by a count of all namespaces.

        If an older quota wrote it last, the new namespaces of the team are counted too.
        """
        stored, team_map = self._teams.read(team), self._team_map()
        is_outdated = team_map is not None and team_map.is_newer_than(stored.ledger)
        if stored.version is not None and not stored.ledger.closed and not is_outdated:
            return stored
        # The count includes only ledgers that name the team. A ledger that was lost and opened again names none.
        for known in self.watched.snapshot().values():
            is_unplaced = self._team_of(known.namespace) == team and not _names(known, team)
            if is_unplaced and (stored_ledger := self._store.stored(known.namespace)):
                self.assign(known.namespace, stored_ledger)
        try:
            return self._teams.open(team, team_map)
        except errors.LedgerLost as error:
            # The recounter must not mistake this for a lost ledger of the namespace.
            raise errors.Unavailable(str(error)) from error

    # The duty of the leader

    def _reconcile(self, name: str) -> float | None:
        quota = self._quota.current()
        if quota is None:
            return None
        known = self.ledgers.get(self._teams.key(name))
        if known is None:
            # The ledger of the team was deleted. The allotments are in the ledgers of the namespaces.
            if any(_names(each, name) for each in self.watched.snapshot().values()):
                self._opened(name)
            return None
        stored = known.read()
        if stored.ledger.closed:
            self._opened(name)
            return None
        team = quota.team(name) if name in quota.teams else None
        if team is None and not stored.ledger.allotted:
            self._delete(name, stored)
            return None
        wanted = stored.ledger.wanted
        is_wanted = wanted != self._served.get(name, "")

        def is_short(ledger: TeamLedger) -> bool:
            return is_wanted or team is None or is_short_of(team, ledger)

        unused = {each: self._unused(name, each, stored.ledger) for each in stored.ledger.allotted}
        if not self._take_back(name, {each: amount for each, amount in unused.items() if amount is not None}, is_short):
            return FAILURE_RETRY_SECONDS if name in self._failed else CONFLICT_RETRY_SECONDS
        self._served[name] = wanted
        return None

    def _delete(self, name: str, stored: StoredTeam) -> None:
        self._served.pop(name, None)
        self._failed.pop(name, None)
        with contextlib.suppress(errors.Conflict, errors.NotFound):
            self._teams.delete(name, str(stored.version))

    def _unused(self, name: str, namespace: str, ledger: TeamLedger) -> float | None:
        """Return how many cores of an allotment seem unused, or `LEFT` if the namespace seems to have left the team.

        Return None if the whole allotment is used, or if the usage is not known.
        """
        known, allotted = self.watched.get(self._store.key(namespace)), ledger.allotted[namespace]
        if known is None or not _names(known, name):
            return LEFT
        try:
            needed = rules.needed(known.read().ledger)
        except errors.UnreadableLedger:
            return None
        is_used = bool(allotted) and rules.covers(needed, allotted)
        return None if is_used else float(total(allotted.values()).cores - total(needed.values()).cores)

    def _take_back(self, name: str, unused: Mapping[str, float], is_short: Callable[[TeamLedger], bool]) -> bool:
        """Lower allotments to what is needed, the largest unused part first, until the team is not short of quota.

        ``unused``: by namespace, the result of `_unused`. Return False if an allotment was not lowered, because of an
        error, because another process was writing, or because there was no more time.
        """
        # If one write lowered several allotments, a raise of any namespace meanwhile would make all of them fail.
        stored, is_done, deadline = self._teams.read(name), True, self._clock() + TURN_SECONDS
        failed = self._failed.pop(name, set())
        for namespace in sorted(unused, key=lambda each: (each in failed, -unused[each], each)):
            if stored.version is None or stored.ledger.closed:
                break
            if unused[namespace] != LEFT and not is_short(stored.ledger):
                break
            if self._clock() >= deadline:
                return False
            try:
                stored = self._lower(name, namespace, stored)
            except errors.Conflict:
                stored, is_done = self._teams.read(name), False
            except errors.VcudaError as error:
                # A tenant can make the LISTs of a namespace slow. So this namespace is the last one in the next turn.
                self._failed.setdefault(name, failed).add(namespace)
                self._log.warning("an allotment was not taken back", team=name, namespace=namespace, error=str(error))
                is_done = False
        return is_done

    def _lower(self, name: str, namespace: str, stored: StoredTeam) -> StoredTeam:
        """Lower the allotment of a namespace to what it needs. Return the ledger of the team.

        ``stored``: the ledger of the team. Raises Conflict if another process writes one of the two ledgers meanwhile.
        """
        # The order is essential: read the ledger of the team, write that of the namespace, then replace the version of
        # the team's ledger that was read. So a raise that is under way fails, or makes this write fail.
        needed = self._needed(name, namespace)
        if needed is None or namespace not in stored.ledger.allotted:
            return stored
        lowered = rules.lowered(stored.ledger, namespace, needed)
        return stored if lowered == stored.ledger else self._write(name, lowered, stored)

    def _needed(self, name: str, namespace: str) -> Allotted | None:
        """Return what a namespace needs of a team's quota, after its ledger was written with no larger allotment.

        Return None if the allotment must not change.
        """
        stored = self._store.stored(namespace)
        if self._team_of(namespace) == name:
            if stored is None and (self._store.is_marked(namespace) or self._exists(namespace)):
                try:
                    stored = self._store.open(namespace)
                except errors.LedgerLost:
                    return None  # The recounter opens this ledger later. Until then, it keeps its allotment.
                stored = self._store.write(namespace, stored.ledger, stored) if stored.opens else stored
            # The pods of a ledger that was lost and opened again count in the team as before.
            stored = stored and self.assign(namespace, stored)
        if stored is None or name not in stored.ledger.allotments:
            return {}
        if stored.ledger.lost or stored.ledger.without_fill() is not stored.ledger:
            return None
        self._store.write(namespace, rules.shrunk(stored.ledger, name), stored)
        return rules.needed(stored.ledger)


def _names(known: NamedLedger, team: str) -> bool:
    return f"{TEAM_PREFIX}{team}" in (known.config_map.metadata.labels or {})


def is_short_of(team: Team, ledger: TeamLedger) -> bool:
    """Return whether little of a limit of the team is not allotted, or whether many namespaces have an allotment."""
    within = all(_has_much_left(limit, ledger.sums.get(model, Charge())) for model, limit in team.limits.items())
    in_total = team.total is None or _has_much_left(team.total, total(ledger.sums.values()))
    return not (within and in_total) or len(ledger.allotted) > CROWDED


def _has_much_left(limit: Limit, allotted: Charge) -> bool:
    amounts = (limit.cores, allotted.cores), (limit.memory, allotted.memory_under(limit))
    return all(most is None or SHORT_PART * (most - used) >= most for most, used in amounts)
