"""An installation with teams, and callers that create pods in the namespaces of teams."""

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.crowd import Crowd
from tests.e2e.installation import LEDGERS, SERVED_BY, Installation, await_enforced, controlling, installed
from tests.e2e.quota_config import QuotaConfigMap
from tests.processes import eventually
from vcuda.kube.team_store import team_ledger_name
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.team import read_team_ledger

REPLICAS = 2


@contextmanager
def with_controller(cluster: Cluster, directory: Path) -> Iterator[Installation]:
    """Run two webhook replicas and a controller with an empty quota, whose edits are not checked."""
    quota = QuotaConfigMap(cluster.rest, "kube-system", f"gpuquota-{secrets.token_hex(4)}", labels={}, further={})
    quota.write("{}").ok()
    with installed(cluster, directory, replicas=REPLICAS, quota=quota) as own, controlling(own):
        yield own


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


def is_in(team: str, ledger: Ledger) -> bool:
    return [*ledger.allotments] == [team]


def create(crowd: Crowd, pods: int) -> None:
    for _ in range(pods):
        eventually(lambda: crowd.create().status == HTTPStatus.CREATED, lambda: crowd.failures)


def stored(cluster: Cluster, *namespaces: str) -> int:
    return sum(len(cluster.pods(namespace)) for namespace in namespaces)


def create_until_stopped(crowd: Crowd) -> Callable[[threading.Event], None]:
    def run(stop: threading.Event) -> None:
        while not stop.is_set():
            crowd.create()

    return run


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
