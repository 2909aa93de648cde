"""The ledger of one team in one webhook replica.

The ledger of a namespace records what the namespace may use of its team's quota: its allotment. While a charge fits the
allotment, the ledger of the team is neither read nor written. Otherwise the allotment is raised: in the ledger of the
team first, and then in the ledger of the namespace, together with the charge. docs/team-ledgers.md has the rules.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec.structs import replace

from vcuda.errors import VcudaError
from vcuda.kube import StoredTeam
from vcuda.ledger.ledger import Admitted, Rejected, is_older
from vcuda.ledger.team import Allotted, TeamLedger, allotted_to_others
from vcuda.quota.model import Charge, Usage, total
from vcuda.quota.shortage import Shortage
from webhook.ledger.batches import SharedCall
from webhook.ledger.charging import PutOff
from webhook.ledger.reservations import ReleaseRequest
from webhook.ledger.shared import READ_TIMEOUT_SECONDS, REMEMBERED_SECONDS, WRITE_TIMEOUT_SECONDS, Shared
from webhook.ledger.team_count import TeamCount

R = TypeVar("R")

TEAM_USAGE_SECONDS = 5.0
"""/mutate may choose a GPU model by allotments in memory that are at most this many seconds old."""


class TeamAccount:
    """Reads and raises the ledger of one team. All calls must come from the same event loop."""

    def __init__(self, team: str, shared: Shared) -> None:
        self.team = team
        self._shared = shared
        # Raises of several namespaces would only conflict with each other, so one is made after the other.
        self._lock = asyncio.Lock()
        self._known = StoredTeam(TeamLedger(), None)
        self._known_at = -math.inf
        read = shared.teams.read
        self._reads = SharedCall(lambda: shared.in_thread(read, team, READ_TIMEOUT_SECONDS), shared.clock)
        self._release_request = ReleaseRequest(shared.clock)
        self._count = TeamCount(team, shared)
        self.counted_others = self._count.others

    async def change(self, change: Callable[[TeamLedger], tuple[TeamLedger, R]]) -> R:
        """Replace the ledger of the team by the ledger that ``change`` returns, unless it is the same ledger. Return
        the other result of ``change``.

        ``change`` may be called twice. Its last call has a ledger that was just read, or that is replaced.
        Raises Conflict if another process wrote first, and WriteUnanswered if the outcome of the write is unknown.
        """
        async with self._lock:
            team_map, known = self._shared.team_map(), self._known.ledger
            recent = self._shared.clock() < self._known_at + REMEMBERED_SECONDS and self._known.version is not None
            is_outdated = known.closed or (team_map is not None and team_map.is_newer_than(known))
            remembered = self._known if recent and not is_outdated else None
            self._known_at = -math.inf
            stored = remembered or await self._open()
            changed, result = change(stored.ledger)
            # Only a compare-and-swap proves that the ledger in memory is not out of date.
            if changed is stored.ledger and remembered:
                stored = await self._open()
                changed, result = change(stored.ledger)
            if changed is not stored.ledger:
                write = self._shared.teams.write
                stored = await self._shared.in_thread(write, self.team, changed, stored, WRITE_TIMEOUT_SECONDS)
            self._remember(stored)
        return result

    async def judge(self, namespace: str, shortage: Shortage, deadline: float) -> Rejected | PutOff:
        """Return a rejection if the stored pods and claims of the team leave no room for a charge; otherwise `PutOff`.

        In the second case, ask the leader of the controller to take back quota that is allotted and not used. A dry run
        asks too. Otherwise it would fail as often as it is repeated, although a create would succeed.
        """
        judged = await self._count.judge(namespace, shortage, deadline)
        if isinstance(judged, Rejected):
            return judged
        with contextlib.suppress(VcudaError):  # the caller retries, and this replica asks again
            if mark := self._release_request.again():
                await self.change(lambda ledger: (replace(ledger, wanted=mark), None))
                self._release_request.stored()
        return replace(judged, soon=self._release_request.just_began)

    async def others(self, namespace: str, seconds: float = TEAM_USAGE_SECONDS) -> Allotted:
        """Return what the other namespaces of the team may use. It may be outdated, and no rejection depends on it.

        ``seconds``: read the ledger of the team if the known one is older.
        """
        if self._shared.clock() >= self._known_at + seconds:
            with contextlib.suppress(VcudaError):
                stored = await self._reads.result(self._shared.clock() + READ_TIMEOUT_SECONDS)
                # Another task may have written a newer version meanwhile.
                if stored and not is_older(stored.version or "", self._known.version or ""):
                    self._remember(stored)
        return self.known_others(namespace)

    def known_others(self, namespace: str) -> Allotted:
        return allotted_to_others(self._known.ledger, namespace)

    async def _open(self) -> StoredTeam:
        shared = self._shared
        return await shared.in_thread(shared.teams.open, self.team, shared.team_map(), READ_TIMEOUT_SECONDS)

    def _remember(self, stored: StoredTeam) -> None:
        self._known, self._known_at = stored, self._shared.clock()


def admitted_beside(admitted: Admitted, model: str, others: Allotted) -> Admitted:
    """Return the admission of a charge, with what the other namespaces of the team may use."""
    usage = replace(admitted.usage, others=others.get(model, Charge()))
    in_total = admitted.total_usage and replace(admitted.total_usage, others=total(others.values()))
    return replace(admitted, usage=usage, total_usage=in_total)


def beside_others(usages: Mapping[str, Usage], others: Allotted) -> Mapping[str, Usage]:
    """Return the usages by model, with what the other namespaces of the team may use."""
    return {
        model: replace(usages.get(model, Usage()), others=others.get(model, Charge()))
        for model in sorted({*usages, *others})
    }
