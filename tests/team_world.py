"""Runs the leader's part in the ledgers of teams with an API server double."""

from collections.abc import Mapping

import msgspec
import structlog

from tests.api_double import ApiDouble
from tests.builders import stored_pod
from tests.quota_map import store_quota
from tests.recounting import CARD, Recounting
from tests.replicas import LEDGER, Replica
from tests.watching import catch_up
from vcuda.kube.team_store import TeamStore
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.team import Allotted
from vcuda.quota.model import Charge

ALONE, VISION, OCEAN = (
    "{}",
    "{vision: {namespaces: [team-a, team-b], quota: {M40: 8}}}",
    ("{ocean: {namespaces: [team-a], quota: {M40: 8}}, vision: {namespaces: [team-b], quota: {M40: 8}}}"),
)
FOUR = Charge(400, 0, 400)
OWN = '{"team-a": {"quota": {"M40": 4}}}'
COLLECTION = LEDGER.rpartition("/")[0]
Allotments = Mapping[str, Allotted]


class World(Recounting):
    """A recounter whose namespace team-a has this ledger and these pods, and may be in team `vision`."""

    def __init__(
        self,
        api: ApiDouble,
        replica: Replica,
        ledger: Ledger,
        cards: int = 0,
        teams: str = VISION,
        *,
        exists: bool = True,
    ) -> None:
        pods = [
            {**pod, "metadata": {**pod["metadata"], "name": f"train-{number}"}}
            for number, pod in ((number, stored_pod(CARD, f"uid-{number}")) for number in range(cards))
        ]
        super().__init__(api, replica, ledger, *pods, gone=not exists)
        self.api, self.store, self.teams = api, replica.store, TeamStore(replica.store)
        self.place(teams)

    def place(self, teams: str, entries: str = "{}") -> None:
        """Edit the quota."""
        store_quota(self.api, entries, gpu_teams=teams)
        self.relist()

    def allot(self, **allotted: Allotted) -> None:
        """Write the ledger of team `vision`."""
        stored = self.teams.open("vision")
        self.teams.write("vision", msgspec.structs.replace(stored.ledger, allotted=allotted), stored)
        self.relist()

    def allotted(self, team: str = "vision") -> Allotments:
        return self.teams.read(team).ledger.allotted

    def ledger(self) -> Ledger:
        return self.store.read("team-a").ledger

    def relist(self) -> None:
        super().relist()
        catch_up(self.recounter.teams.ledgers)

    def serve(self, team: str = "vision") -> list[str]:
        """Take a turn for a team. Return the logged warnings."""
        self.relist()
        with structlog.testing.capture_logs() as logs:
            self.recounter.teams.reconciler.turn(team)
        return [line["event"] for line in logs if line["log_level"] == "warning"]
