"""Tests of teams: namespaces that join, move and end, and lost ledgers. Two replicas and a controller run."""

import json
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.crowd import Crowd
from tests.e2e.installation import LEDGERS, SERVED_BY, Installation, await_enforced, controlling, installed
from tests.e2e.ledgers import await_committed, await_ledger, await_published
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.steady import in_threads
from tests.e2e.workloads import was_told, workload
from tests.integration.reviews import gpu_pod
from tests.processes import eventually
from tools.control_plane import ControlPlane
from vcuda.kube.team_store import team_ledger_name
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.team import read_team_ledger

REPLICAS = 2
CARD = {"tencent.com/vcuda-core": 100}
MOVES = 6
DECISIONS = 60
"""The number of creates that are decided between two moves."""


class Teams:
    """An installation with teams. ``limits``: the cards of each team, by its name."""

    def __init__(self, own: Installation, **limits: int) -> None:
        self.own, self.cluster, self.limits = own, own.cluster, limits
        self._stack = ExitStack()

    def __enter__(self) -> "Teams":
        return self

    def __exit__(self, *_: object) -> None:
        self.place()
        self._stack.close()

    def namespace(self, name: str | None = None) -> str:
        labels = {SERVED_BY: self.own.label}
        return self._stack.enter_context(self.cluster.fresh_namespace(labels, name or f"e2e-{secrets.token_hex(4)}"))

    def place(self, **members: list[str]) -> None:
        """Replace all teams by teams with these members. Return when the replicas use the edit."""
        teams = {
            name: {"namespaces": listed, "quota": {"M40": self.limits[name]}}
            for name, listed in members.items()
            if listed
        }
        further = self.own.quota.further
        assert isinstance(further, dict)
        further["gpu_teams"] = json.dumps(teams)
        self.own.quota.limit_anew(**self.own.quota.document())
        for namespace in (each for listed in members.values() for each in listed):
            await_enforced(self.cluster, namespace)

    def allotted(self, team: str) -> dict[str, int]:
        """Return the cards of M40, in hundredths, that the ledger of a team allots; nothing while there is none."""
        found = self.cluster.rest.send("GET", f"{LEDGERS}/{team_ledger_name(team)}")
        if found.status == HTTPStatus.NOT_FOUND:
            return {}
        allotted = read_team_ledger(found.ok()["data"]["ledger"]).allotted
        return {namespace: int(charges["M40"].cores) for namespace, charges in allotted.items() if "M40" in charges}

    def crowd(self, namespace: str) -> Crowd:
        return Crowd(self.cluster, namespace, range(REPLICAS))


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    quota = QuotaConfigMap(cluster.rest, "kube-system", f"gpuquota-{secrets.token_hex(4)}", labels={}, further={})
    quota.write("{}").ok()
    directory = tmp_path_factory.mktemp("teams")
    with installed(cluster, directory, replicas=REPLICAS, quota=quota) as own, controlling(own):
        yield own


def is_in(team: str, ledger: Ledger) -> bool:
    return [*ledger.allotments] == [team]


def create(crowd: Crowd, pods: int) -> None:
    for _ in range(pods):
        eventually(lambda: crowd.create().status == HTTPStatus.CREATED, lambda: crowd.failures)


def stored(cluster: Cluster, *namespaces: str) -> int:
    return sum(len(cluster.pods(namespace)) for namespace in namespaces)


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


def create_until_stopped(crowd: Crowd) -> Callable[[threading.Event], None]:
    def run(stop: threading.Event) -> None:
        while not stop.is_set():
            crowd.create()

    return run


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


def churn(cluster: Cluster, namespace: str, crowd: Crowd) -> Callable[[threading.Event], None]:
    """Return a loop that creates pods, and deletes a pod when it has three or is rejected."""

    def run(stop: threading.Event) -> None:
        names: list[str] = []
        while not stop.is_set():
            answer = crowd.create()
            if answer.status == HTTPStatus.CREATED:
                names.append(answer.ok()["metadata"]["name"])
            if names and (len(names) > 2 or answer.status != HTTPStatus.CREATED):
                cluster.delete_pod(namespace, names.pop(0))

    return run


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
