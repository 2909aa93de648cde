"""The reservation of a webhook replica in a ledger, from which it grants charges without a write for each.

The rules, and why no interleaving admits too much, are in docs/ledger.md; tests/model explores them.
"""

import bisect
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from vcuda.ledger.ledger import LEASE_SECONDS, Ledger, Pending, Reservation
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, NamespaceQuota, fits
from webhook.ledger.ledgers import ChargeWindow

RATE_SECONDS = 4.0
"""The time by which demand is measured; after as long without any the reservation is given back. A replica of several
hardly sees more than a charge a second of one namespace: in a shorter time there would be too few to reserve for."""

TARGET_SECONDS = 5.0
"""For so much of the demand a replica reserves: for longer than the time after which it writes in any case."""

LEAST_SPAN_SECONDS = 0.1
"""The shortest time over which demand is measured, so that a few charges at once are not mistaken for a high rate. A
burst that has just begun reserves for seconds: a smaller first reservation would cost one more write."""

LEAST_GRANTS = 4
"""The least demand for which room is reserved, and the least that is reserved, in charges. If this replica admitted
fewer within `RATE_SECONDS`, and the ledger has fewer pending, each charge is written alone, because a write costs less
than a reservation hides. The pending charges show what the other replicas admit: without them, each replica would make
four writes before it reserves."""

WRITE_SECONDS, MOST_WRITE_SECONDS = 1.0, 4.0
"""The least and the most time from one write to the next. A write moves the granted charges from the reservation to the
pending charges, and shows this replica whether another one waits for room. So a replica writes seldom only while there
is much room. The most is less than half of a lease, so that a failed write can be repeated."""

PART_OF_TIME = 8
"""Within these bounds a replica writes after one part in so many of the time in which the room would be used up, if
every replica that reserves had the same demand."""

SPENT_PART = 4
"""A replica writes at once if one part in so many of its reservation is left."""

MOST_GRANTED = 128
"""A replica writes at once after so many granted charges, because a namespace may have some hundreds pending."""

LEAST_ROOM = 20
"""With room for fewer charges nothing is reserved: near its limit a namespace is decided exactly."""

PART_OF_ROOM, PART_OF_REPLICA = 4, 10
"""All replicas together, and one, reserve at most one part in so many of the room that is left. One that dies withholds
its part until the leader knows of it, after some 90 s."""

CREATED_SECONDS = LEASE_SECONDS
"""For how long after the answer to a write, by the API server's clock, an object may be created that is granted from
its reservation. Both are in whole seconds; where clocks run, the lease itself ends before that."""

GIVE_WAY_SECONDS = 2.0
"""Seconds for which a replica reserves nothing after a new `waiting` mark."""


class Terms(NamedTuple):
    """The quota that a charge is decided by, and the versions that it is from."""

    quota: NamespaceQuota
    counted_since: str
    config_version: str


def boot_seconds() -> float:
    """Return the seconds since this machine booted, while it was suspended too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Demand:
    """The charges that this replica admitted within the last `RATE_SECONDS`, by model."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._charges = ChargeWindow(RATE_SECONDS, clock)
        self._since = -math.inf
        self.recent = self._charges.sums

    def add(self, uid: str, model: str, charge: Charge) -> None:
        """Count a charge of now, once: a charge is decided again after another replica wrote first."""
        if not self.recent():
            self._since = self._clock()
        self._charges.add(uid, model, charge)

    @property
    def seconds(self) -> float:
        """The time of the demand in seconds: `RATE_SECONDS`, or less if the demand has just begun."""
        return min(max(self._clock() - self._since, LEAST_SPAN_SECONDS), RATE_SECONDS)


class Plan(NamedTuple):
    """The next reservation: its charges by model, and the seconds until the next write is due."""

    charges: Mapping[str, Charge]
    next_seconds: float


def plan(ledger: Ledger, quota: NamespaceQuota, demand: Demand) -> Plan:
    """Plan the next reservation. Its charges always fit the room that the ledger leaves.

    The ledger must be without the replica's own reservation, and must have all charges that the replica granted.
    """
    replicas = len(ledger.reserved) + 1
    busy = max(sum(number for number, _ in demand.recent().values()), len(ledger.pending)) >= LEAST_GRANTS
    charges: dict[str, Charge] = {}
    full_seconds = math.inf
    for model, (number, charged) in demand.recent().items():
        mean = Charge(*(math.ceil(part / number) for part in msgspec.structs.astuple(charged)))
        if not mean.cores or model not in quota.limits:
            continue
        room = _room(quota.limits[model], ledger.usage(model).used, mean)
        full_seconds = min(full_seconds, room * demand.seconds / (number * replicas))
        wanted = max(math.ceil(number * TARGET_SECONDS / demand.seconds), LEAST_GRANTS)
        most = min(wanted, room // max(PART_OF_ROOM * replicas, PART_OF_REPLICA))
        if busy and most and room >= LEAST_ROOM:
            charges[model] = _times(mean, most)
    if not charges:
        return Plan(charges, WRITE_SECONDS)
    return Plan(charges, min(max(full_seconds / PART_OF_TIME, WRITE_SECONDS), MOST_WRITE_SECONDS))


def _room(limit: Limit, used: Charge, charge: Charge) -> int:
    """Return how many charges like this one the limit still admits."""
    if limit.cores is None:
        # A charge takes at least a hundredth of a MiB, before the sum is rounded.
        most = (limit.memory or 0) * CORES_PER_CARD
    else:
        most = max(limit.cores - used.cores, 0) // charge.cores
    return bisect.bisect_left(range(1, most + 1), True, key=lambda n: not fits(limit, used, _times(charge, n)))


def _times(charge: Charge, number: int) -> Charge:
    return Charge(charge.cores * number, charge.memory * number, charge.card_memory * number)


class _Sent(msgspec.Struct, frozen=True):
    """A write that is under way, or whose outcome is unknown.

    ``at``: when it was sent first. ``terms``: the quota by which it was sized. ``next_seconds``: until the next one.
    """

    reservation: Reservation
    uids: frozenset[str]
    at: float
    terms: object
    next_seconds: float


class ReservationLease:
    """One replica's reservation in one ledger, and what it granted from that and has not seen written.

    The clock is one that counts suspension. Not safe in threads: grants and the outcomes of writes come one after the
    other, on one event loop.
    """

    def __init__(self, clock: Callable[[], float] = boot_seconds) -> None:
        self._clock = clock
        # Each start of a process gets a new id, because it does not know what its predecessor granted.
        self.holder = secrets.token_urlsafe(9)
        self.granted: dict[str, Pending] = {}
        self._reserved: Mapping[str, Charge] = {}
        self._terms: object = None
        self._counter = 0
        self._until = self._created_until = self._due_at = -math.inf
        self._sent: _Sent | None = None
        # The rest that may be granted, whether or not the current write lands. It is kept, since every charge needs it.
        self._left: dict[str, Charge] = {}
        self._waiting: str | None = None
        self._give_way_until = -math.inf

    @property
    def active(self) -> bool:
        """Whether there is something to write: a reservation, which ends by a write too, or what was granted."""
        return bool(self._reserved or self.granted or self._sent)

    @property
    def is_due(self) -> bool:
        """Whether it is time to write what was granted, and to hear whether somebody waits for room."""
        if len(self.granted) >= MOST_GRANTED or self._clock() >= self._due_at:
            return True
        left = ((each, self._left.get(model, Charge())) for model, each in self._reserved.items())
        return any(rest.cores * SPENT_PART <= each.cores for each, rest in left)

    @property
    def gives_way(self) -> bool:
        """Whether nothing is to be reserved, as somebody waits for room."""
        return self._clock() < self._give_way_until

    def is_by(self, terms: object) -> bool:
        """Return whether these terms sized what may be granted, whatever becomes of a write that is under way."""
        # A reservation that was sized by a larger limit would let a charge pass the limit of now.
        return self._terms == terms and (self._sent is None or self._sent.terms == terms)

    def grant(self, uid: str, asked: Pending, created: float) -> bool:
        """Grant a charge if it is certain to be counted. ``created``: the creationTimestamp, in Unix seconds."""
        # The time of creation is a second fence: it holds where a machine was suspended together with its clocks.
        if self._clock() > self._until or created > self._created_until:
            return False
        if uid not in self.granted:
            left = self._left.get(asked.model, Charge())
            if not left.covers(asked.charge):
                return False
            self.granted[uid] = asked
            self._left[asked.model] = left - asked.charge
        return True

    def observe(self, ledger: Ledger) -> None:
        """Take up what a ledger that was read says of this replica; no write is under way that could land later."""
        own, sent = ledger.reserved.get(self.holder), self._sent
        if sent and own and own.counter == sent.reservation.counter:
            # It has landed, and nobody heard when: nothing is granted until another is confirmed.
            self._confirm(sent)
            self._until = self._due_at = -math.inf
        self._sent = None
        self._left = self._remaining()
        if own is None:
            # It was taken away after its time, and by then everything that was granted from it was counted.
            self.forget()
        if self._waiting is not None and ledger.waiting != self._waiting:
            self._give_way_until = self._clock() + GIVE_WAY_SECONDS
        self._waiting = ledger.waiting

    def forget(self) -> None:
        """Give up the reservation, and what was granted from it: the ledger is gone, or this replica's part of it."""
        self._reserved, self.granted, self._sent, self._left = {}, {}, None, {}
        self._until = self._due_at = -math.inf

    def flushed(self, ledger: Ledger) -> Ledger:
        """Return the ledger without this replica's reservation, and with all that it granted pending."""
        if self.holder not in ledger.reserved and not self.granted:
            return ledger
        others = {holder: each for holder, each in ledger.reserved.items() if holder != self.holder}
        return msgspec.structs.replace(ledger, reserved=others, pending={**self.granted, **ledger.pending})

    def send(
        self, ledger: Ledger, charges: Mapping[str, Charge], terms: object = None, next_seconds: float = WRITE_SECONDS
    ) -> Ledger:
        """Return the flushed ledger with a reservation of these charges; it is under way from now on.

        ``terms``: the quota by which the charges were sized. ``next_seconds``: after how many the next write is due.
        """
        if not (charges or self.active):
            return ledger
        self._counter += 1
        reservation = Reservation(charges, self._counter)
        self._sent = _Sent(reservation, frozenset(self.granted), self._clock(), terms, next_seconds)
        # If it does not land there is what is left now; if it does, what it reserves for those that come from now on.
        for model, left in self._left.items():
            after = charges.get(model, Charge())
            self._left[model] = left.minimum(after)
        if not charges:
            return ledger
        return msgspec.structs.replace(ledger, reserved={**ledger.reserved, self.holder: reservation})

    def confirmed(self, answered: float) -> None:
        """Take up that the write has landed; ``answered`` is the API server's time of it, in Unix seconds."""
        if sent := self._sent:
            self._confirm(sent)
            self._created_until = answered + CREATED_SECONDS
            self._sent = None

    def _confirm(self, sent: _Sent) -> None:
        self._reserved = sent.reservation.charges
        self._until, self._due_at = sent.at + LEASE_SECONDS, sent.at + sent.next_seconds
        self._terms = sent.terms
        self.granted = {uid: each for uid, each in self.granted.items() if uid not in sent.uids}
        self._left = self._remaining()

    def _remaining(self) -> dict[str, Charge]:
        left = dict(self._reserved)
        for each in self.granted.values():
            left[each.model] = left.get(each.model, Charge()) - each.charge
        return left
