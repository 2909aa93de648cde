"""The reservation of a webhook replica: quota that it holds in advance, to admit many pods by one ledger write.

`Spending` measures the demand of the replica, and sizes the reservation by this demand.

docs/ledger.md has the rules of reservations, and proves that no quota is exceeded. tests/model checks this.
"""

import bisect
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from vcuda.ledger.ledger import MAX_PENDING, NO_MODEL, RESERVATION_SECONDS, Admitted, Ledger, Pending, Reservation
from vcuda.quota.model import CORES_PER_CARD, NO_LIMIT, Charge, Cores, Limit, Mode, NamespaceQuota, fits, total
from webhook.caches import ChargeWindow
from webhook.ledger.batches import Charging
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.shared import Shared, boot_seconds

RATE_SECONDS = 4.0
"""A replica measures its demand for quota over this many seconds. After this time without demand, it releases its
reservation. The time is long enough that one charge per second makes `MIN_CHARGES` charges."""

TARGET_SECONDS = 5.0
"""A replica reserves quota for the demand of this many seconds. Its next ledger write follows earlier, after at most
`MAX_WRITE_SECONDS`."""

MIN_SPAN_SECONDS = 0.1
"""The shortest time in seconds over which a replica measures demand. Without this minimum, a few simultaneous charges
would look like a high rate, and the replica would reserve too much quota."""

MIN_CHARGES = 4
"""A replica reserves quota for at least this many charges, unless its share of the free quota is smaller. It reserves
nothing if it admitted fewer charges within `RATE_SECONDS` and the ledger has fewer pending charges. Pending charges
show the demand at all replicas. So a replica may reserve quota before it has had this demand itself."""

WRITE_SECONDS, MAX_WRITE_SECONDS = 1.0, 4.0
"""The shortest and the longest time in seconds between two ledger writes of a replica with a reservation. A write
records the charges that the replica admitted from its reservation. It also shows the replica whether a charge at
another replica needs quota. So the longest time applies only while much quota is free. It is less than half of
`RESERVATION_SECONDS`, so that the replica can repeat a failed write before the reservation expires."""

PART_OF_TIME = 8
"""A replica with a reservation estimates when the free quota would be used up if every replica had the same demand. It
writes the ledger after an eighth of this time, but within `WRITE_SECONDS` and `MAX_WRITE_SECONDS`."""

SPENT_PART = 4
"""A replica writes the ledger, and reserves quota again, when only a quarter of its reservation is left."""

MAX_SPENT = 128
"""A replica writes the ledger immediately when it has admitted this many charges from its reservation. The write makes
them pending charges, of which a ledger has at most `MAX_PENDING`."""

MIN_ROOM = 20
"""A replica reserves nothing if the free quota is too small for this many charges. So when little quota is free, the
replica writes each charge to the ledger before it admits the pod."""

PART_OF_ROOM, PART_OF_REPLICA = 4, 10
"""All replicas together reserve at most a quarter of the free quota, and one replica at most a tenth. If a replica
dies, no other replica can use the reserved quota until the leading controller frees it, after about 90 s."""

CREATED_SECONDS = RESERVATION_SECONDS
"""A replica admits a pod or claim from a reservation only if the API server created the object within this many seconds
after it answered the write of the reservation. The API server sets both times. So this rule holds even if the replica's
clock was suspended. If the clock runs, the reservation expires earlier."""

GIVE_WAY_SECONDS = 2.0
"""A replica that reads a new `waiting` mark in the ledger reserves nothing for this many seconds. The mark means that a
charge would fit if no quota were reserved."""

SOON_SECONDS = 2.0
"""A running controller recounts a ledger (sets it to the count of the stored objects) within this many seconds. If
quota is missing for longer, the answer to a pod does not advise an immediate retry."""

ASK_AGAIN_SECONDS = 1.0
"""This replica asks for quota with at most one mark in a ledger within this many seconds. When other processes read a
new mark, they release quota, so that a charge of this replica can fit."""


class Basis(NamedTuple):
    """The quota by which a reservation is sized. If the quota changes, the older reservation admits no more charges."""

    quota: NamespaceQuota
    counted_since: str
    """The resourceVersion of the ConfigMap with this quota. A ledger that was counted before the edit may lack pods."""
    config_version: str
    """The resourceVersion of the quota ConfigMap from which the values of GPU resources were read."""


class Demand:
    """The demand for quota: the charges that this replica admitted within the last `RATE_SECONDS`, by GPU model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._charges = ChargeWindow(RATE_SECONDS, clock)
        self._since = -math.inf
        self.recent = self._charges.sums

    def add(self, uid: str, model: str, charge: Charge) -> None:
        """Add an admitted charge, unless its uid was added before: after a conflict, charges are decided again."""
        if not self.recent():
            self._since = self._clock()
        self._charges.add(uid, model, charge)

    @property
    def seconds(self) -> float:
        """The seconds over which the demand is measured: `RATE_SECONDS`, or fewer if the demand began more recently."""
        return min(max(self._clock() - self._since, MIN_SPAN_SECONDS), RATE_SECONDS)


class Plan(NamedTuple):
    """The next reservation of a replica: the quota by GPU model, and the seconds until its next ledger write is due."""

    charges: Mapping[str, Charge]
    next_seconds: float = WRITE_SECONDS


def plan_reservation(
    ledger: Ledger, quota: NamespaceQuota, demand: Demand, others: Mapping[str, Charge] | None = None
) -> Plan:
    """Plan the next reservation of this replica. A reservation always fits the free quota of the namespace.

    ``ledger``: without the present reservation of this replica, but with all charges admitted from that reservation.
    ``others``: by model, what the other namespaces of the team may use. The reservation then fits the free quota of the
    team too.
    """
    team = None if others is None else quota.team
    replicas = len(ledger.reserved) + 1
    part = max(PART_OF_ROOM * replicas, PART_OF_REPLICA)
    busy = max(sum(number for number, _ in demand.recent().values()), len(ledger.pending)) >= MIN_CHARGES
    charges: dict[str, Charge] = {}
    full_seconds = math.inf
    # The free cards of all models together, and how many of them this replica may still reserve.
    free: Cores = sys.maxsize
    for limit, used in ((quota.total, Charge()), (team and team.total, total((others or {}).values()))):
        if limit:
            free = min(free, max(limit.most_cores - (ledger.total_usage().used + used).cores, 0))
    left: Cores = free // part
    for model, (number, charged) in demand.recent().items():
        mean = charged.mean(number)
        if not mean.cores or model not in quota.limits:
            continue
        used = ledger.usage(model).used
        room = min(_room(quota.limits[model], used, mean), free // mean.cores)
        if team:
            used_in_team = used + (others or {}).get(model, Charge())
            room = min(room, _room(team.limits.get(model, NO_LIMIT), used_in_team, mean))
        full_seconds = min(full_seconds, room * demand.seconds / (number * replicas))
        wanted = max(math.ceil(number * TARGET_SECONDS / demand.seconds), MIN_CHARGES)
        most = min(wanted, room // part, left // mean.cores)
        if busy and most and room >= MIN_ROOM:
            charges[model] = mean * most
            left -= charges[model].cores
    if not charges:
        return Plan(charges)
    return Plan(charges, min(max(full_seconds / PART_OF_TIME, WRITE_SECONDS), MAX_WRITE_SECONDS))


def _room(limit: Limit, used: Charge, charge: Charge) -> int:
    if limit.cores is None:
        # If only memory is limited, this is an upper bound, because before rounding each charge has at least 1/100 MiB.
        most = (limit.memory or 0) * CORES_PER_CARD
    else:
        most = max(limit.cores - used.cores, 0) // charge.cores
    return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not fits(limit, used, charge * n))


class _Sent(msgspec.Struct, frozen=True):
    """A ledger write that stores a reservation. The write is still in progress, or its outcome is unknown."""

    reservation: Reservation
    """The reservation that the write stores."""
    uids: frozenset[str]
    """The uids of the charges that were admitted from the reservation, and that this write makes pending."""
    at: float
    """When the write was first sent, by the clock that also runs while the machine is suspended."""
    basis: object
    """The namespace's quota (`Basis`) by which the size of the reservation was computed."""
    next_seconds: float
    """Seconds from this write until the next write of the replica is due."""


class ReplicaReservation:
    """The reservation of one webhook replica in one ledger, and the charges spent from it.

    A spent charge is a charge that the replica has admitted from its reservation and has not yet written.
    ``clock`` must also count the time in which the machine is suspended. One event loop must make all calls.
    """

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        self._clock = clock
        # The id of the replica changes at each restart, because a restarted replica has no list of the
        # charges that it admitted from its earlier reservation.
        self.replica = secrets.token_urlsafe(9)
        self.spent: dict[str, Pending] = {}
        self._reserved: Mapping[str, Charge] = {}
        self._basis: object = None
        self._counter = 0
        self._until = self._created_until = self._due_at = -math.inf
        self._sent: _Sent | None = None
        # Maps each GPU model to the unused part of the reservation. While a write is in progress, this part is unused
        # whether or not the API server stores the write.
        self._left: dict[str, Charge] = {}
        self._waiting: str | None = None
        self._give_way_until = -math.inf

    @property
    def active(self) -> bool:
        """Whether a reservation or unwritten charges exist, so that this replica must write the ledger again later."""
        return bool(self._reserved or self.spent or self._sent)

    @property
    def is_due(self) -> bool:
        """True if the ledger must be written now: many charges are unwritten, time is up, or little quota is left."""
        if len(self.spent) >= MAX_SPENT or self._clock() >= self._due_at:
            return True
        left = ((each, self._left.get(model, Charge())) for model, each in self._reserved.items())
        return any(rest.cores * SPENT_PART <= each.cores for each, rest in left)

    @property
    def gives_way(self) -> bool:
        """True if this replica must reserve nothing now, because a charge elsewhere needs reserved quota."""
        return self._clock() < self._give_way_until

    def is_by(self, basis: object) -> bool:
        """Return True if the reservations, stored and being written, were sized by the quota ``basis``."""
        # A reservation that was sized by an earlier, larger limit could admit a charge beyond the present limit.
        return self._basis == basis and (self._sent is None or self._sent.basis == basis)

    def spend(self, uid: str, entry: Pending, created: float) -> bool:
        """Admit a charge from the reservation and return True. Return False if the ledger must be written first.

        ``created``: the creationTimestamp of the pod or claim, in Unix seconds.
        """
        # If the machine was suspended together with its clocks, this replica may not notice that the reservation has
        # expired. So the object must also have been created before it expires, by the clock of the API server.
        if self._clock() > self._until or created > self._created_until:
            return False
        if uid not in self.spent:
            left = self._left.get(entry.model, Charge())
            if not left.covers(entry.charge):
                return False
            self.spent[uid] = entry
            self._left[entry.model] = left - entry.charge
        return True

    def observe(self, ledger: Ledger) -> None:
        """Update this object by a newly read ledger: by the replica's reservation in it, and the last `waiting` mark.

        The caller must ensure that the API server can no longer store an earlier write of this replica.
        """
        own, sent = ledger.reserved.get(self.replica), self._sent
        if sent and own and own.counter == sent.reservation.counter:
            # The API server stored the last write at an unknown time. So the replica admits nothing more from the
            # reservation until the API server confirms another write.
            self._confirm(sent)
            self._until = self._due_at = -math.inf
        self._sent = None
        self._left = self._remaining()
        if own is None:
            # The process that removed this reservation (for example the leader of the controller) has counted all
            # stored pods. So this replica may forget the charges that it admitted from the reservation.
            self.forget()
        if self._waiting is not None and ledger.waiting != self._waiting:
            self._give_way_until = self._clock() + GIVE_WAY_SECONDS
        self._waiting = ledger.waiting

    def forget(self) -> None:
        """Forget the reservation and the spent charges, because the ledger no longer has the reservation."""
        self._reserved, self.spent, self._sent, self._left = {}, {}, None, {}
        self._until = self._due_at = -math.inf

    def flushed(self, ledger: Ledger) -> Ledger:
        """Return the ledger without this replica's reservation. The charges admitted from it become pending charges."""
        if self.replica not in ledger.reserved and not self.spent:
            return ledger
        rest = {replica: each for replica, each in ledger.reserved.items() if replica != self.replica}
        return msgspec.structs.replace(ledger, reserved=rest, pending={**self.spent, **ledger.pending})

    def send(
        self, ledger: Ledger, charges: Mapping[str, Charge], basis: object = None, next_seconds: float = WRITE_SECONDS
    ) -> Ledger:
        """Return the ledger to write, with a reservation of ``charges``. The caller must begin this write next.

        ``ledger``: a result of `flushed`. ``basis``: the quota that determined the size of ``charges``.
        ``next_seconds``: seconds until the next write is due.
        """
        if not (charges or self.active):
            return ledger
        self._counter += 1
        reservation = Reservation(charges, self._counter)
        self._sent = _Sent(reservation, frozenset(self.spent), self._clock(), basis, next_seconds)
        # The API server may store this write or not. So the replica may admit only from the smaller of two amounts: the
        # rest of the old reservation, and the new reservation.
        for model, left in self._left.items():
            after = charges.get(model, Charge())
            self._left[model] = left.minimum(after)
        if not charges:
            return ledger
        return msgspec.structs.replace(ledger, reserved={**ledger.reserved, self.replica: reservation})

    def confirmed(self, answered: float) -> None:
        """Record that the ledger from `send` was stored. ``answered``: the Unix time of the API server's answer."""
        if sent := self._sent:
            self._confirm(sent)
            self._created_until = answered + CREATED_SECONDS
            self._sent = None

    def _confirm(self, sent: _Sent) -> None:
        self._reserved = sent.reservation.charges
        self._until, self._due_at = sent.at + RESERVATION_SECONDS, sent.at + sent.next_seconds
        self._basis = sent.basis
        self.spent = {uid: each for uid, each in self.spent.items() if uid not in sent.uids}
        self._left = self._remaining()

    def _remaining(self) -> dict[str, Charge]:
        left = dict(self._reserved)
        for each in self.spent.values():
            left[each.model] = left.get(each.model, Charge()) - each.charge
        return left


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
