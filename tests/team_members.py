"""The namespaces of a team, whose pods two webhook replicas charge."""

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.api_double import ApiDouble
from tests.builders import ONE_CARD, stored_pod
from tests.replicas import CARD, Clock, Replica, kinds
from tests.waiting import PATIENT
from vcuda.kube import TeamStore
from vcuda.ledger import team as team_rules
from vcuda.ledger.ledger import Allotment, Ledger
from vcuda.ledger.team import TeamLedger, raised
from vcuda.quota.model import Cores, Limit, NamespaceQuota, Team
from webhook.ledger.charging import Decision

LIMITS = {"M40": Limit(400), "P100": Limit(400)}
VISION, SPEECH = Team("vision", LIMITS), Team("speech", LIMITS)


def quota(team: Team | None = VISION, **fields: object) -> NamespaceQuota:
    limits = team.limits if team else LIMITS
    return NamespaceQuota(**{"limits": limits, "team": team, **fields})  # type: ignore[arg-type]  # a test may give any fields


def vision(cards: int) -> NamespaceQuota:
    return quota(Team("vision", {"M40": Limit(100 * cards)}))


class Recorder(ApiDouble):
    """Records the method and the name of the object of each call, for example ``PUT team.vision``."""

    def __init__(self) -> None:
        super().__init__()
        self.named: list[str] = []

    def get(self, path: str, _params: object = None, timeout: float = 10) -> bytes:
        self._record("GET", path)
        return super().get(path, _params, timeout)

    def put(self, path: str, body: bytes, _params: object = None, timeout: float = 10, **done: Any) -> bytes:
        self._record("PUT", path)
        return super().put(path, body, _params, timeout, **done)

    def _record(self, method: str, path: str) -> None:
        self.named.append(f"{method} {path.rpartition('gpu-ledger-')[2]}")


class Members:
    """The namespaces of team vision, and two replicas that charge pods with one card."""

    def __init__(self, api: ApiDouble) -> None:
        self.api, self.clock = api, Clock()
        api.date = lambda: datetime.fromtimestamp(0, UTC)
        self.replica, self.other = Replica(api, self.clock), Replica(api, self.clock)
        self.store = self.replica.store
        self.teams = TeamStore(self.store)
        self._uids = itertools.count()

    def charge(self, uid: str, namespace: str = "team-a", by: Replica | None = None, **fields: object) -> Decision:
        given = {"namespace": namespace, "quota": quota(), "counted_since": "7", "deadline": self.clock.now + PATIENT}
        return (by or self.replica).charge(uid, **{**given, **fields})

    def charge_all(self, *names: str, by: Replica | None = None, **fields: object) -> list[str]:
        return kinds(self.charge(f"uid-{next(self._uids)}", name, by, **fields) for name in names)

    def allotted(self, model: str = "M40", team: str = "vision") -> Mapping[str, Cores]:
        ledger = self.teams.read(team).ledger
        return {namespace: each[model].cores for namespace, each in ledger.allotted.items() if model in each}

    def ledger(self, namespace: str = "team-a") -> Ledger:
        return self.store.read(namespace).ledger

    def change_team(self, change: Callable[[TeamLedger], TeamLedger]) -> None:
        opened = self.teams.open("vision")
        self.teams.write("vision", change(opened.ledger), opened)

    def change_ledger(self, change: Callable[[Ledger], Ledger], namespace: str = "team-a") -> None:
        opened = self.store.open(namespace)
        self.store.write(namespace, change(opened.ledger), opened)

    def store_pods(self, namespace: str, number: int) -> None:
        for each in range(number):
            path = f"/api/v1/namespaces/{namespace}/pods/train-{each}"
            self.api.store(path, stored_pod(ONE_CARD, uid=f"{namespace}-{each}"))

    def commit(self, namespace: str, cards: int) -> None:
        """Store a ledger with these charges, and the allotment of its namespace."""
        used = {"M40": CARD * cards}
        self.change_ledger(lambda _: Ledger(used, self.api.version, allotments={"vision": Allotment(used)}), namespace)
        self.change_team(lambda team: raised(team, namespace, used))

    def check(self) -> None:
        """Check that each namespace uses at most its allotment, and that the ledger of the team knows the allotment."""
        _, ledgers = self.teams.members("vision")
        team = self.teams.read("vision").ledger
        for namespace, ledger in ledgers.items():
            allotment = ledger.allotments["vision"]
            assert team_rules.covers(team.allotted.get(namespace, {}), allotment.charges)
            assert team_rules.covers(allotment.charges, team_rules.needed(ledger))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def members(recorder: Recorder) -> Members:
    return Members(recorder)
