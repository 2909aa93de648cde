"""Stores the ledgers of teams. The ledger of a team allots the team's quota to the namespaces of the team.

Each is one ConfigMap in the namespace of the ledgers, which is written by compare-and-swap. A ledger that is new, or
that was restored from a backup, may lack allotments. So it is closed: nothing is allotted by it. The ledgers of the
namespaces record their allotments, so they are read before the ledger of the team is opened.
"""

import contextlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec
import structlog

from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import client, watch
from vcuda.kube.ledger_marks import MARK, SeenVersions, answered
from vcuda.kube.ledger_store import (
    KEY,
    NAMESPACE_LABEL,
    NOT_TRACKED,
    TEAM_PREFIX,
    LedgerStore,
    Stored,
    decode_stored,
    decode_text,
)
from vcuda.kube.reflector import Reflector
from vcuda.ledger.ledger import Ledger, is_older
from vcuda.ledger.team import (
    TeamLedger,
    brings_charges,
    join,
    largest,
    needed,
    read_team_ledger,
    unchecked,
    write_team_ledger,
)

TEAM_LABEL = "quota.vcuda.io/team-ledger-of"

RESTORED = "restored-"
"""The beginning of `TeamLedger.closed` if etcd was restored from a backup. The ledger is then opened after a wait."""

MARKS = f"app.kubernetes.io/managed-by=vcuda-quota,!{NAMESPACE_LABEL},!{TEAM_LABEL}"
"""Selects the marks of namespaces among all ConfigMaps in the namespace of the ledgers."""

_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


class StoredTeam(msgspec.Struct, frozen=True):
    """The ledger of a team as it was read or written.

    ``version``: the resourceVersion of its ConfigMap; None if no ledger is stored.
    """

    ledger: TeamLedger
    version: str | None


class NamedTeam(msgspec.Struct, frozen=True):
    """One version of the ledger of a team, from a watch. `read` decodes it."""

    team: str
    config_map: k8s_types.ConfigMap

    def read(self) -> StoredTeam:
        """Return the decoded ledger. Raises UnreadableLedger if the ledger's text is damaged."""
        return StoredTeam(decode_text(self.config_map, read_team_ledger), self.config_map.metadata.resource_version)


class TeamMap(NamedTuple):
    """The teams of namespaces in one version of the quota ConfigMap. ``team_of`` returns the team of a namespace."""

    team_of: Callable[[str], str | None]
    version: str

    def is_newer_than(self, ledger: TeamLedger) -> bool:
        """Return True if no process with this quota, or a newer one, has looked for new namespaces of the team."""
        return is_older(ledger.config_version, self.version)


class TeamStore:
    """Reads and writes the ledgers of teams. A write raises Conflict if the stored ledger has changed since its read.

    ``ledgers`` stores the ledgers of the namespaces.
    """

    def __init__(self, ledgers: LedgerStore) -> None:
        self._ledgers = ledgers
        self._kube = ledgers.kube
        self._versions = SeenVersions(ledgers.uncertain_seconds, ledgers.clock)
        # Maps a team to the text that closes its ledger, and to the time at which this process first read this text.
        self._closed: dict[str, tuple[str, float]] = {}

    def read(self, team: str, timeout: float = 10) -> StoredTeam:
        """Return the ledger of a team, which may be closed. If there is none, return an empty one without a version.

        Raises UnreadableLedger if the ledger is damaged, and Conflict if another process closes it at the same time.
        """
        newest = self._versions.newest(team)
        try:
            stored = NamedTeam(team, _CONFIG_MAP.decode(self._kube.get(self._path(team), timeout=timeout))).read()
        except errors.NotFound:
            return StoredTeam(TeamLedger(), None)
        if int(stored.version or 0) >= newest:
            return self._recorded(team, stored)
        # This process has read a newer version before, so etcd was restored from a backup.
        closed = msgspec.structs.replace(stored.ledger, closed=RESTORED + secrets.token_urlsafe(6))
        return self._recorded(team, self._put(team, closed, stored.version, timeout), anew=True)

    def open(self, team: str, team_map: TeamMap | None = None, timeout: float = 10) -> StoredTeam:
        """Return the open ledger of a team. If it is closed or missing, first count what each namespace needs that has
        an allotment from the team.

        ``team_map``: the teams of namespaces. A ledger that was lost together with the ledger of the team has no
        allotment, but is counted if ``team_map`` names the team. If an older quota wrote the ledger last, the charges
        of the new namespaces of the team are counted first.

        Raises the errors of `write`. Raises LedgerLost while pods may still be stored that were charged before etcd was
        restored from a backup. Raises Unavailable if it is not known what a namespace needs. After an error the caller
        may call `open` again.
        """
        while (stored := self.read(team, timeout)).version is None:
            self._create(team, timeout)
        if team_map and not stored.ledger.closed and team_map.is_newer_than(stored.ledger):
            stored = self._with_new_members(team, stored, team_map, timeout)
        return self._counted(team, stored, team_map, timeout) if stored.ledger.closed else stored

    def _counted(self, team: str, stored: StoredTeam, team_map: TeamMap | None, timeout: float) -> StoredTeam:
        """Open a closed ledger by a count of what its namespaces need."""
        left = self._uncertain(team, stored.ledger.closed)
        if left > 0 and stored.ledger.closed.startswith(RESTORED):
            raise errors.LedgerLost(team, self._ledgers.uncertain_seconds - left, left, "team")
        allotted = {**stored.ledger.allotted}
        listed = dict(self._found(team, timeout)[1])
        if team_map and not allotted:
            joined, uncounted = self._joined(team, team_map, listed, timeout)
            if uncounted:
                raise uncounted
            listed |= joined
        for namespace, config_map in listed.items():
            if found := self._unchecked(team, namespace, config_map, timeout):
                needs = [needed(found), found.allotments[team].charges]
                # A closed ledger may lack charges.
                if found.lost and namespace not in allotted:
                    raise _uncounted(team)
                allotted[namespace] = largest(*needs, allotted[namespace] if found.lost else {})
        allotted = {namespace: charges for namespace, charges in allotted.items() if charges}
        opened = msgspec.structs.replace(stored.ledger, allotted=allotted, closed="")
        if team_map and team_map.is_newer_than(opened):
            opened = msgspec.structs.replace(opened, config_version=team_map.version)
        return self.write(team, opened, stored, timeout)

    def members(self, team: str, timeout: float = 10) -> tuple[str, Mapping[str, Ledger]]:
        """Return a pair: the resourceVersion of a LIST, and the ledgers in it that have an allotment from a team, by
        namespace. A damaged ledger is returned as an empty one, so that only the stored objects count."""
        version, found = self._found(team, timeout)
        ledgers = dict.fromkeys(found, Ledger())
        for namespace, config_map in found.items():
            with contextlib.suppress(errors.UnreadableLedger):
                ledgers[namespace] = decode_stored(config_map).ledger
        return version, ledgers

    def write(self, team: str, ledger: TeamLedger, replaced: StoredTeam, timeout: float = 10) -> StoredTeam:
        """Write ``ledger`` in place of ``replaced``, the result of an earlier `read`, `open` or `write`.

        Raises Conflict if another process was first, and WriteUnanswered if it is unknown whether it was stored.
        """
        if replaced.version is None:
            raise ValueError(team)  # a programming error: a ledger without a version must be opened before a write
        return self._recorded(team, self._put(team, ledger, replaced.version, timeout))

    def delete(self, team: str, version: str) -> None:
        """Delete the ledger of a team, if it still has ``version``. Otherwise raises Conflict or NotFound.

        The caller must ensure that the ledger allots nothing.
        """
        self._kube.delete(self._path(team), msgspec.json.encode({"preconditions": {"resourceVersion": version}}))

    def reflector(self, on_change: Callable[[str], None]) -> Reflector[NamedTeam]:
        """Return a reflector of the ledgers of all teams. ``on_change`` is called with the team after a change."""

        def on_event(old: NamedTeam | None, new: NamedTeam | None) -> None:
            if changed := new or old:
                on_change(changed.team)

        selector = {"labelSelector": TEAM_LABEL}
        return Reflector(self._kube, self._ledgers.collection, _decode_named, params=selector, on_event=on_event)

    def key(self, team: str) -> watch.Key:
        return watch.Key(self._ledgers.namespace, team_ledger_name(team))

    def _create(self, team: str, timeout: float) -> None:
        # A create has no older resourceVersion to compare with. So it must allot nothing, and the ledger is closed.
        body = self._encode(team, TeamLedger(closed=secrets.token_urlsafe(6)), None)
        with contextlib.suppress(errors.Conflict):
            answered(lambda: self._kube.post(self._ledgers.collection, body, timeout=timeout))

    def _uncertain(self, team: str, closed: str) -> float:
        """Return for how many seconds pods may still be stored that were charged before the ledger was lost."""
        now = self._ledgers.clock()
        known, since = self._closed.get(team, ("", now))
        self._closed[team] = closed, since if known == closed else now
        return self._closed[team][1] + self._ledgers.uncertain_seconds - now

    def _found(self, team: str, timeout: float) -> tuple[str, Mapping[str, k8s_types.ConfigMap]]:
        version, found = "", dict[str, k8s_types.ConfigMap]()
        selector = {"labelSelector": f"{TEAM_PREFIX}{team}"}
        for page in self._kube.list_pages(self._ledgers.collection, selector, timeout=timeout):
            version = page.resource_version
            for config_map in map(_CONFIG_MAP.decode, page.items):
                found[(config_map.metadata.labels or {})[NAMESPACE_LABEL]] = config_map
        return version, found

    def _joined(
        self, team: str, team_map: TeamMap, listed: Collection[str], timeout: float
    ) -> tuple[Mapping[str, k8s_types.ConfigMap], errors.Unavailable | None]:
        """Put the ledgers of further namespaces into the team, and return them. A lost ledger is opened again.

        Only the mark of a namespace shows that its ledger is missing, because it was lost. The second result is an
        error if a ledger cannot be opened yet.
        """
        joined, uncounted = {}, None
        for page in self._kube.list_pages(self._ledgers.collection, {"labelSelector": MARKS}, timeout=timeout):
            for mark in map(_CONFIG_MAP.decode, page.items):
                namespace = mark.metadata.name.removeprefix(MARK)
                if namespace in listed or team_map.team_of(namespace) != team:
                    continue
                try:
                    joined[namespace] = self._join(team, namespace, team_map, timeout)
                except errors.Unavailable as error:
                    uncounted = error  # the waits for all lost ledgers begin now
        return joined, uncounted

    def _with_new_members(self, team: str, stored: StoredTeam, team_map: TeamMap, timeout: float) -> StoredTeam:
        """Put the namespaces into the team that a newer quota names. If they bring charges, close the ledger.

        A ledger that cannot be read or opened now counts when the leader has recounted it.
        """
        listed = self._found(team, timeout)[1]
        brings = False
        for namespace, config_map in {**listed, **self._joined(team, team_map, listed, timeout)[0]}.items():
            with contextlib.suppress(errors.Unavailable):
                brings = brings or brings_charges(_decoded(team, config_map).ledger, team, namespace, stored.ledger)
        closed = secrets.token_urlsafe(6) if brings else ""
        counted = msgspec.structs.replace(stored.ledger, closed=closed, config_version=team_map.version)
        return self.write(team, counted, stored, timeout)

    def _join(self, team: str, namespace: str, team_map: TeamMap, timeout: float) -> k8s_types.ConfigMap:
        with _unnamed(team, namespace):
            stored = self._ledgers.open(namespace, timeout, waits=False)
            if is_older(team_map.version, stored.ledger.team_version):
                raise errors.Unavailable("a newer quota has placed the namespace")
            self._ledgers.write(namespace, join(stored.ledger, team, team_map.version), stored, timeout)
            return _CONFIG_MAP.decode(self._kube.get(self._ledgers.path(namespace), timeout=timeout))

    def _unchecked(self, team: str, namespace: str, found: k8s_types.ConfigMap, timeout: float) -> Ledger | None:
        """Write the ledger of a namespace, so that a raise that began before this write fails, and that each later
        admission checks the limits of the team. Return the ledger; None if it does not name the team any more.

        Raises Unavailable if the ledger was deleted meanwhile. Only the marks show whether it was lost.
        """
        while team in (stored := _decoded(team, found)).ledger.allotments:
            with _unnamed(team, namespace):
                try:
                    return self._ledgers.write(namespace, unchecked(stored.ledger, team), stored, timeout).ledger
                except errors.Conflict:
                    found = _CONFIG_MAP.decode(self._kube.get(self._ledgers.path(namespace), timeout=timeout))
        return None

    def _put(self, team: str, ledger: TeamLedger, version: str | None, timeout: float) -> StoredTeam:
        body = self._encode(team, ledger, version)
        try:
            raw = answered(lambda: self._kube.put(self._path(team), body, timeout=timeout))
        except errors.NotFound as error:
            # The ledger was deleted. To the caller this is a change by another process, so raise Conflict.
            raise errors.Conflict(error.status, error.message) from error
        return StoredTeam(ledger, _CONFIG_MAP.decode(raw).metadata.resource_version)

    def _recorded(self, team: str, stored: StoredTeam, *, anew: bool = False) -> StoredTeam:
        self._versions.record(team, stored.version, anew=anew)
        if not stored.ledger.closed:
            self._closed.pop(team, None)
        return stored

    def _encode(self, team: str, ledger: TeamLedger, version: str | None) -> bytes:
        metadata = {
            "name": team_ledger_name(team),
            "namespace": self._ledgers.namespace,
            "labels": {"app.kubernetes.io/managed-by": "vcuda-quota", TEAM_LABEL: team},
            "managedFields": NOT_TRACKED,
            **({"resourceVersion": version} if version is not None else {}),
        }
        data = {KEY: write_team_ledger(ledger)}
        return msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def _path(self, team: str) -> str:
        return f"{self._ledgers.collection}/{client.segment(team_ledger_name(team))}"


@contextlib.contextmanager
def _unnamed(team: str, namespace: str) -> Iterator[None]:
    """Replace errors about the ledger of a namespace, except Conflict, by one that does not name the namespace."""
    try:
        yield
    except errors.Conflict:
        raise
    except errors.VcudaError as error:
        structlog.get_logger().warning("ledger not counted", namespace=namespace, team=team, error=str(error))
        raise _uncounted(team) from error


def _uncounted(team: str) -> errors.Unavailable:
    # The owner of a pod gets this text, so it must not name another namespace.
    return errors.Unavailable(f"the ledger of a namespace of team {team} has not been counted yet")


def _decoded(team: str, config_map: k8s_types.ConfigMap) -> Stored:
    try:
        return decode_stored(config_map)
    except errors.UnreadableLedger as error:
        # As above. An operator learns the name from the recount of this ledger.
        raise errors.Unavailable(f"the ledger of a namespace of team {team} cannot be read") from error


def team_ledger_name(team: str) -> str:
    # A namespace has no dot in its name, so its ledger has another name. The policy of ledgers protects the prefix.
    return f"gpu-ledger-team.{team}"


def _decode_named(raw: bytes) -> NamedTeam:
    config_map = _CONFIG_MAP.decode(raw)
    return NamedTeam((config_map.metadata.labels or {})[TEAM_LABEL], config_map)
