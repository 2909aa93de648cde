"""What one webhook replica spends in the ledger of one namespace: its demand, and its reservation.

A reservation is quota that a replica holds in advance, so that it can admit charges without a write.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec

from vcuda.ledger.ledger import MAX_PENDING, NO_MODEL, Admitted, Ledger, Pending
from vcuda.quota.model import Charge, Mode
from webhook.ledger.batches import Charging
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.reservations import GIVE_WAY_SECONDS, Basis, Demand, Plan, ReplicaReservation, plan_reservation
from webhook.ledger.shared import Shared

SOON_SECONDS = 2.0
"""A running controller recounts a ledger (sets it to the count of the stored objects) within this many seconds. If
quota is missing for longer, the answer to a pod does not advise an immediate retry."""

ASK_AGAIN_SECONDS = 1.0
"""This replica asks for quota with at most one mark in a ledger within this many seconds. When other processes read a
new mark, they release quota, so that a charge of this replica can fit."""


class ReleaseRequest:
    """Records when this replica asked other processes to release quota, by a new mark in a ledger."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The times of the last mark, and of the first in a row of marks.
        self._asked_at = self._since = -math.inf

    def again(self) -> str:
        """Return a new mark for the ledger; empty if the last mark is recent."""
        now = self._clock()
        if now >= self._asked_at + GIVE_WAY_SECONDS:
            self._since = now
        return "" if now < self._asked_at + ASK_AGAIN_SECONDS else secrets.token_urlsafe(6)

    def stored(self) -> None:
        """Record that a mark is stored. So if the write of a mark fails, a new mark is set."""
        self._asked_at = self._clock()

    @property
    def just_began(self) -> bool:
        """True if quota is expected soon, because this replica asked for it just now."""
        return self._clock() < self._since + SOON_SECONDS


class Spending:
    """The demand and the reservation of this replica in the ledger of one namespace."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.reservation = ReplicaReservation(shared.boot_clock)
        self.demand = Demand(shared.clock)
        self.release_request = ReleaseRequest(shared.clock)
        # The quota by which this replica sizes its next reservation.
        self.basis: Basis | None = None

    def spend(self, request: ChargeRequest, known: Ledger) -> bool:
        """Admit a charge from the reservation, to write it later. Return False if the charge must be written first.

        ``known``: the newest ledger that this replica has read or written.
        """
        crowded = len(known.pending) + len(self.reservation.spent) >= MAX_PENDING
        # If no watch reports the deletion of a pod, only a grace period in the ledger keeps its charge until the pod
        # has ended. So the charge of a pod with a long grace period is written before the pod is admitted.
        if request.dry_run or request.grace or crowded or not self.reservation.is_by(self._basis_of(request)):
            return False
        if not self.reservation.spend(request.uid, Pending(request.model, request.charge), request.created):
            return False
        self._shared.metrics.spent.inc()
        self.demand.add(request.uid, request.model, request.charge)
        return True

    def record_demand(self, calls: Sequence[Charging], decisions: Sequence[Decision]) -> None:
        """Add the admitted charges to the measured demand, by which `plan` then sizes the next reservation."""
        for call, decision in zip(calls, decisions, strict=True):
            request = call.item
            if isinstance(decision, Admitted) and not request.dry_run and request.model != NO_MODEL:
                self.demand.add(request.uid, request.model, request.charge)
        if calls:
            self.basis = self._basis_of(calls[-1].item)

    def plan(self, ledger: Ledger, others: Mapping[str, Charge] | None) -> Plan:
        """Plan the next reservation, whose size depends on the demand and on the free quota.

        ``others``: by model, what the other namespaces of the team may use; None to leave out the limits of the team.
        """
        basis = self.basis
        if not basis or basis.quota.mode is not Mode.ENFORCE or self.reservation.gives_way or self._shared.leaving:
            return Plan({})
        return plan_reservation(ledger, basis.quota, self.demand, others)

    def sent(self, ledger: Ledger, plan: Plan) -> Ledger:
        """Return the ledger to write, with the next reservation. The caller must begin the write next."""
        return self.reservation.send(ledger, plan.charges, self.basis, plan.next_seconds)

    def request_release(self, ledger: Ledger) -> Ledger:
        """Return the ledger with a new `waiting` mark, unless the last mark is recent. Replicas then release quota."""
        mark = self.release_request.again()
        return msgspec.structs.replace(ledger, waiting=mark) if mark else ledger

    def _basis_of(self, request: ChargeRequest) -> Basis:
        return Basis(request.quota, request.counted_since, self._shared.store.resources().version)
