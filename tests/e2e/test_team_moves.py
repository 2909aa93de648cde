"""Tests of teams: namespaces that join, move and end, and lost ledgers. Two replicas and a controller run."""

import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import dropwhile
from typing import NamedTuple

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.crowd import Crowd
from tests.e2e.installation import LEDGERS, SERVED_BY, Installation
from tests.e2e.ledgers import await_committed, await_ledger, await_published
from tests.e2e.observer import PODS, WATCH_SECONDS, Stored
from tests.e2e.rest import Rest
from tests.e2e.steady import in_threads
from tests.e2e.team_installation import Teams, churn, create, create_until_stopped, is_in, stored, with_controller
from tests.e2e.workloads import was_told, workload
from tests.integration.reviews import gpu_pod
from tests.processes import eventually
from tools.control_plane import ControlPlane
from vcuda.kube.team_store import team_ledger_name

CARD = {"tencent.com/vcuda-core": 100}
MOVES = 6
DECISIONS = 60
"""The number of creates that are decided between two moves."""

STAY_SECONDS = 10
MOVES_UNDER_LOAD = 18 if float(os.environ.get("CHAOS_SECONDS") or 0) >= 180 else 3
"""The number of moves while the creates of the namespaces are compared: for three minutes, or for 30 seconds."""

OWN_LIMIT, SHARED_LIMIT = 6, 9
DECISIONS = 60
"""The number of creates that are decided between two moves."""


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with with_controller(cluster, tmp_path_factory.mktemp("teams")) as own:
        yield own


def test_the_running_pods_of_a_namespace_that_joins_a_team_count_and_nothing_is_admitted_while_they_exceed_it(
    cluster: Cluster, own: Installation
) -> None:
    with Teams(own, vision=4) as teams, own.quota.limited(**{(joins := teams.namespace()): {"quota": {"M40": 3}}}):
        stays = teams.namespace()
        teams.place(vision=[stays])
        crowds = {namespace: teams.crowd(namespace) for namespace in (stays, joins)}
        for crowd in crowds.values():
            create(crowd, 3)
        teams.place(vision=[stays, joins])
        await_ledger(own, joins, partial(is_in, "vision"))
        eventually(lambda: sum(teams.allotted("vision").values()) == 600, lambda: teams.allotted("vision"))
        answer = cluster.try_create(gpu_pod("more", stays, CARD))
        assert answer.status in (403, 429)
        eventually(lambda: "in team vision" in cluster.try_create(gpu_pod("more", stays, CARD)).message)
        for pod in cluster.pods(joins):
            cluster.delete_pod(joins, pod["metadata"]["name"])
        crowds[stays].create_until_rejected()
        assert stored(cluster, stays, joins) == 4, crowds[stays].failures[-3:]
        assert all("in team vision" in message and "limited: 4" in message for message in crowds[stays].failures)


def test_deleted_pods_of_one_namespace_leave_quota_that_others_of_its_team_use(
    cluster: Cluster, own: Installation
) -> None:
    with Teams(own, vision=200) as teams:
        first, second = teams.namespace(), teams.namespace()
        teams.place(vision=[first, second])
        filling = teams.crowd(first)
        with in_threads([create_until_stopped(filling)] * 8):
            eventually(lambda: len(filling.failures) > 0, lambda: filling.answers)
        filling.create_until_rejected()
        assert stored(cluster, first, second) == 200
        use = await_published(cluster, second, lambda use: use["team"]["models"][0]["used"] == 200)
        assert (use["models"][0]["used"], use["models"][0]["available"]) == (0, 0)
        assert first not in json.dumps(use)
        for pod in cluster.pods(first)[:50]:
            cluster.delete_pod(first, pod["metadata"]["name"])
        waiting = teams.crowd(second)
        waiting.create_until_rejected()
        assert (stored(cluster, first), stored(cluster, second)) == (150, 50)


def test_creates_during_moves_of_a_namespace_exceed_no_limit(cluster: Cluster, own: Installation) -> None:
    """A namespace takes its pods along, which may exceed the limit of the new team. Until enough pods of this team are
    deleted, it admits none. From then on the team stays within its limit until the next move."""
    with Teams(own, vision=6, ocean=6) as teams:
        left, right, moving = teams.namespace(), teams.namespace(), teams.namespace()
        teams.place(vision=[left, moving], ocean=[right])
        crowds = {name: teams.crowd(name) for name in (left, right, moving)}
        with in_threads([churn(cluster, name, crowd) for name, crowd in crowds.items() for _ in range(3)]):
            for number in range(MOVES):
                team = ("vision", "ocean")[number % 2]
                members = {"vision": [left], "ocean": [right]}
                members[team] = [*members[team], moving]
                teams.place(**members)
                await_ledger(own, moving, partial(is_in, team))
                check_limits(cluster, members, crowds)
        for name in (left, right, moving):
            for pod in cluster.pods(name):
                cluster.delete_pod(name, pod["metadata"]["name"])
        for name in ("vision", "ocean"):
            crowds[members[name][0]].create_until_rejected()
            assert stored(cluster, *members[name]) == teams.limits[name], "the team lost quota in the moves"


class Stay(NamedTuple):
    """A time in which the namespaces of each team do not change. ``since``, ``until``: resourceVersions."""

    members: Mapping[str, list[str]]
    since: int
    until: int


@dataclass
class States:
    """The number of stored pods in some namespaces after each change. ``seen``: begins with resourceVersions."""

    namespaces: Sequence[str]
    seen: list[tuple[int, Counter[str]]] = field(default_factory=list)

    def follow(self, rest: Rest, stop: threading.Event) -> None:
        objects = Stored(rest, (PODS,))
        with ThreadPoolExecutor(1) as threads:
            while not stop.is_set():
                for pods, change in objects.follow(threads, WATCH_SECONDS):
                    counts = Counter(pod["metadata"]["namespace"] for pod in pods)
                    self.seen.append((change.version, Counter({name: counts[name] for name in self.namespaces})))

    def sums(self, stay: Stay, names: Sequence[str]) -> list[int]:
        """Return the number of pods of these namespaces in each state of ``stay``, the first state included."""
        before = [counts for version, counts in self.seen if version <= stay.since][-1:]
        during = [counts for version, counts in self.seen if stay.since < version <= stay.until]
        return [sum(counts[name] for name in names) for counts in (*before, *during)]


@pytest.mark.chaos
@pytest.mark.timeout(MOVES_UNDER_LOAD * STAY_SECONDS + 300)
def test_a_namespace_that_moves_every_ten_seconds_gets_at_least_half_of_the_creates_of_others(
    cluster: Cluster, own: Installation
) -> None:
    """One namespace moves between two teams that have another namespace each. Two namespaces stay in a third team.

    All namespaces have limits of their own, which no stored state exceeds. The namespace that moves takes its pods
    along. So the limit of a team holds from the first state after a move that is within the limit.
    """
    with Teams(own, vision=SHARED_LIMIT, ocean=SHARED_LIMIT, calm=SHARED_LIMIT) as teams:
        left, right, moving, *calm = names = [teams.namespace() for _ in range(5)]
        crowds = {name: teams.crowd(name) for name in names}
        callers = [churn(cluster, name, crowd) for name, crowd in crowds.items() for _ in range(2)]
        states, stays = States(names), list[Stay]()
        with own.quota.limited(**{name: {"quota": {"M40": OWN_LIMIT}} for name in names}):
            teams.place(vision=[left, moving], ocean=[right], calm=calm)
            with in_threads([partial(states.follow, cluster.rest), *callers]):
                for number in range(MOVES_UNDER_LOAD):
                    ends = time.monotonic() + STAY_SECONDS
                    members = {"ocean": [right], "vision": [left], "calm": calm}
                    team = ("ocean", "vision")[number % 2]
                    members[team] = [*members[team], moving]
                    teams.place(**members)
                    await_ledger(own, moving, partial(is_in, team))
                    since = version(cluster)
                    time.sleep(max(ends - time.monotonic(), 0))
                    stays.append(Stay(members, since, version(cluster)))
    report(crowds, states, stays)
    assert max(max(counts.values()) for _, counts in states.seen) == OWN_LIMIT
    for stay in stays:
        for listed in stay.members.values():
            sums = [*dropwhile(SHARED_LIMIT.__lt__, states.sums(stay, listed))]
            assert sums
            assert max(sums) <= SHARED_LIMIT
    created = {name: crowd.answers[HTTPStatus.CREATED] for name, crowd in crowds.items()}
    assert created[moving] >= sum(created[name] for name in calm) / 2 / 2


def version(cluster: Cluster) -> int:
    return int(cluster.rest.get("/api/v1/namespaces", limit="1")["metadata"]["resourceVersion"])


def report(crowds: Mapping[str, Crowd], states: States, stays: Sequence[Stay]) -> None:
    """Print the counts of the test. pytest shows them with the flag `-s`, or in the report of a failure."""
    checked = sum(len(states.sums(stay, names)) for stay in stays for names in stay.members.values())
    print(f"\n{len(states.seen)} states, {checked} checks of a team's limit in {len(stays)} stays")
    for crowd in crowds.values():
        print(dict(crowd.answers), *(f"{count} {reason}" for reason, count in crowd.reasons.most_common()), sep="\n  ")


def check_limits(cluster: Cluster, members: dict[str, list[str]], crowds: dict[str, Crowd]) -> None:
    """Wait until each team is within its limit. Then no consistent LIST may find more pods, during many creates."""

    def decided() -> int:
        return sum(crowd.answers.total() for crowd in crowds.values())

    def exceeded() -> list[str]:
        pods = Counter(pod["metadata"]["namespace"] for pod in cluster.rest.get("/api/v1/pods")["items"])
        return [team for team, names in members.items() if sum(pods[name] for name in names) > 6]

    eventually(lambda: not exceeded(), exceeded)
    until = decided() + DECISIONS
    found: list[list[str]] = []

    def is_done() -> bool:
        found.append(exceeded())
        return decided() >= until

    eventually(is_done, lambda: found)
    assert not any(found)


def test_a_deleted_team_ledger_is_rebuilt_from_the_ledgers_of_the_namespaces(
    cluster: Cluster, own: Installation
) -> None:
    with Teams(own, vision=10) as teams:
        first, second = teams.namespace(), teams.namespace()
        teams.place(vision=[first, second])
        crowds = [teams.crowd(first), teams.crowd(second)]
        with in_threads([create_until_stopped(crowd) for crowd in crowds]):
            eventually(lambda: stored(cluster, first, second) >= 5)
            for _ in range(3):
                cluster.delete(f"{LEDGERS}/{team_ledger_name('vision')}")
                eventually(lambda: sum(teams.allotted("vision").values()) >= 500)
            eventually(lambda: all(crowd.failures for crowd in crowds))
        assert stored(cluster, first, second) == 10
        used = {name: 100 * stored(cluster, name) for name in (first, second)}
        eventually(lambda: teams.allotted("vision") == {name: cores for name, cores in used.items() if cores})


@pytest.mark.usefixtures("controller_manager")
def test_a_namespace_that_is_deleted_and_made_again_neither_inherits_nor_loses_charges(
    cluster: Cluster, own: Installation
) -> None:
    with Teams(own, vision=4) as teams:
        stays, ends = teams.namespace(), f"e2e-{secrets.token_hex(4)}"
        with cluster.fresh_namespace({SERVED_BY: own.label}, ends):
            teams.place(vision=[stays, ends])
            create(teams.crowd(ends), 3)
            await_committed(own, ends, M40=300)
        cluster.await_gone("/api/v1/namespaces", ends)
        crowd = teams.crowd(stays)
        crowd.create_until_rejected()
        assert stored(cluster, stays) == 4
        teams.namespace(ends)
        again = teams.crowd(ends)
        again.create_until_rejected()
        assert stored(cluster, ends) == 0
        cluster.delete_pod(stays, cluster.pods(stays)[0]["metadata"]["name"])
        again.create_until_rejected()
        assert (stored(cluster, stays), stored(cluster, ends)) == (3, 1)


@pytest.mark.usefixtures("controller_manager")
def test_a_workload_is_retried_when_another_namespace_of_its_team_frees_quota(
    cluster: Cluster, control_plane: ControlPlane, own: Installation
) -> None:
    manager = control_plane.controller_manager
    assert manager is not None
    with Teams(own, vision=1) as teams:
        first, second = teams.namespace(), teams.namespace()
        teams.place(vision=[first, second])
        eventually(lambda: cluster.try_create(gpu_pod("train-0", first, CARD)).status == HTTPStatus.CREATED)
        await_committed(own, first, M40=100)
        waiting: Json = workload("ReplicaSet", second)
        cluster.create(waiting)

        def was_rejected(events: list[Json]) -> bool:
            return any("in team vision" in each["message"] for each in events)

        cluster.await_events(second, "reason=FailedCreate", was_rejected)
        with manager.away():  # it would also retry after some time
            cluster.delete_pod(first, "train-0")
            cluster.await_object(cluster.path_of(waiting), "train", was_told)
        cluster.await_pods(second, bool)
