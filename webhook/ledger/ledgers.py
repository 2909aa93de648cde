"""The interface of the ledgers, and the ledgers in memory.

The deadline of a review and the recent choices of /mutate are here too.
"""

import math
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from vcuda.errors import Dropped, DropReason
from vcuda.ledger.ledger import MOST_PENDING, Admitted, Ledger, Pending, Refused, admit
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Shortage, Usage


class ReviewDeadline:
    """The deadline of a review by ``clock``, and whether anybody waits. The event loop shares it with a thread."""

    def __init__(self, end: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = end
        self.charging = False
        self._clock = clock
        self._abandoned = False

    @classmethod
    def after(cls, seconds: float) -> "ReviewDeadline":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return self.end - self._clock()

    def abandon(self) -> None:
        """Note that nobody waits for the answer any more."""
        self._abandoned = True

    def keep(self) -> None:
        """Note that a charge may be written from now on. The review is then decided even if its caller has gone."""
        self.charging = True

    def check(self) -> None:
        """Raise Dropped if the deadline has passed, or the caller has gone. Call it between the parts of long work."""
        # Reviews call this for each of tens of thousands of terms, so the usual case comes first.
        if self.charging or (not self._abandoned and self._clock() < self.end):
            return
        if self._abandoned:
            raise Dropped("the caller of this review has gone", DropReason.DISCONNECTED)
        raise Dropped("the deadline of this review has passed", DropReason.LATE)


class RetryLater(msgspec.Struct, frozen=True):
    """The charge is not decided yet. ``reason``: a sentence without a full stop. ``soon``: it passes within 2 s."""

    reason: str
    soon: bool = False


class PutOff(msgspec.Struct, frozen=True):
    """The charge does not fit the ledger; the stored objects leave room, or were not ``counted`` in time. Retry."""

    shortages: tuple[Shortage, ...]
    soon: bool = False
    counted: bool = True


Decision = Admitted | Refused | PutOff | RetryLater

CROWDED = RetryLater("too many pods of this namespace are being created at once")


class ChargeRequest(msgspec.Struct, frozen=True):
    """The charge of one pod or claim, to be decided. ``uid`` is that of the object.

    ``deadline``: in seconds of the monotonic clock.
    ``counted_since``: the version of the quota. A ledger that was counted before it may lack pods that were stored
    while the namespace had no limit.
    ``created``: the creationTimestamp that the API server has set just now, in Unix seconds. Without it the charge is
    never granted from a reservation.
    ``grace``: seconds for which the pod may run after a forced deletion, if the ledger must record them; otherwise 0.
    """

    namespace: str
    uid: str
    model: str
    charge: Charge
    quota: NamespaceQuota
    deadline: float
    counted_since: str = ""
    dry_run: bool = False
    created: float = math.inf
    grace: int = 0

    def decide(self, ledger: Ledger) -> Decision:
        """Decide against one version of the namespace's ledger; nothing is written."""
        asked = Pending(self.model, self.charge, self.grace)
        decision = admit(ledger, self.uid, asked, self.quota, enforced=self.quota.mode is Mode.ENFORCE)
        return decision if isinstance(decision, Admitted | Refused) else CROWDED


class Ledgers(Protocol):
    """The ledgers of all namespaces. All coroutines of one object run on the same event loop."""

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing.

        Raises Unavailable if the store did not answer; whether the charge is kept is not known.
        """

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model; a model without a charge is left out.

        Raises Unavailable if the store did not answer.
        """

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return the usage of a moment ago. It may be used to prefer a model, never to refuse a pod."""

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return the usage by the stored objects, with the terminating part of ``charged``. A refusal may rest on it.

        None if the objects could not be counted before the deadline. Raises Unavailable if the store did not answer.
        """

    async def close(self) -> None:
        """Write all charges that are not written yet. The caller must have stopped answering reviews."""


MOST_NAMESPACES = 10_000
"""Most namespaces for which a value is kept, since callers may invent names."""

IDLE_SECONDS = 600.0
"""Seconds for which the value of an unused namespace is kept; far longer than any such value is valid."""

TOO_MANY_NAMESPACES = RetryLater("too many namespaces have a ledger in memory")

V = TypeVar("V")


class ByNamespace(Generic[V]):
    """A cache of one value for each namespace. The value that was used longest ago may be dropped, and made again."""

    def __init__(self, make: Callable[[str], V], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        # Each value with the time of its last use, the oldest first.
        self._kept: dict[str, tuple[V, float]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def values(self) -> list[V]:
        return [value for value, _ in self._kept.values()]

    def __getitem__(self, namespace: str) -> V:
        now = self._clock()
        value = self._kept.pop(namespace)[0] if namespace in self._kept else self._make(namespace)
        self._kept[namespace] = value, now
        while len(self._kept) > MOST_NAMESPACES or next(iter(self._kept.values()))[1] + IDLE_SECONDS < now:
            del self._kept[next(iter(self._kept))]
        return value


class MemoryLedgers:
    """Ledgers in this process alone: for the embedded mode, the demo and `check`."""

    def __init__(self, committed: Mapping[str, Mapping[str, Charge]] = types.MappingProxyType({})) -> None:
        self._ledgers = {namespace: Ledger(committed=taken) for namespace, taken in committed.items()}

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing."""
        # No lock: nothing is awaited between reading the ledger and keeping it.
        if request.namespace not in self._ledgers and len(self._ledgers) >= MOST_NAMESPACES:
            return TOO_MANY_NAMESPACES
        decision = request.decide(self._ledgers.get(request.namespace, Ledger()))
        if isinstance(decision, Admitted) and not request.dry_run:
            self._ledgers[request.namespace] = _oldest_committed(decision.ledger)
        return decision

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        return self._ledgers.get(namespace, Ledger()).usages()

    cached_usage = usage

    async def stored_usage(
        self, _namespace: str, charged: Mapping[str, Usage], _deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return what is charged, since no other objects are known here."""
        return charged

    async def close(self) -> None:
        """Do nothing: these ledgers are written nowhere."""


def _oldest_committed(ledger: Ledger) -> Ledger:
    # On a cluster the controller commits stored pods. No controller runs here, so the oldest pending charge is
    # committed when there are too many. Otherwise the namespace would reject every further pod.
    if len(ledger.pending) < MOST_PENDING:
        return ledger
    uid, oldest = next(iter(ledger.pending.items()))
    committed = {**ledger.committed, oldest.model: ledger.committed.get(oldest.model, Charge()) + oldest.charge}
    pending = {other: entry for other, entry in ledger.pending.items() if other != uid}
    return msgspec.structs.replace(ledger, committed=committed, pending=pending)


# The API server takes less time from /mutate to /validate, even with other webhooks in between. A choice that this
# replica has not charged by then was charged by another replica, or another webhook refused its pod.
CHOICE_SECONDS = 2.0


class ChargeWindow:
    """The charges of the last ``seconds``, with their number and sum by model. It is for one thread."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        # By key, in the order of time.
        self._charges: OrderedDict[object, tuple[float, str, Charge]] = OrderedDict()
        # The sums are kept up to date, because a burst makes thousands of charges and each needs the sums.
        self._sums: dict[str, tuple[int, Charge]] = {}

    def add(self, key: object, model: str, charge: Charge) -> None:
        """Count a charge of now under a key, once."""
        sums = self.sums()
        if key not in self._charges:
            number, charged = sums.get(model, (0, Charge()))
            self._sums[model] = number + 1, charged + charge
            self._charges[key] = self._clock(), model, charge

    def remove_alike(self, model: str, charge: Charge) -> None:
        """Remove the oldest charge of this model and amount, if there is one."""
        self.sums()
        alike = (key for key, (_, own, amount) in self._charges.items() if (own, amount) == (model, charge))
        if (oldest := next(alike, None)) is not None:
            self._remove(oldest)

    def sums(self) -> Mapping[str, tuple[int, Charge]]:
        """Return by model how many charges there were, and their sum. Forget the older charges."""
        since = self._clock() - self._seconds
        while self._charges and next(iter(self._charges.values()))[0] <= since:
            self._remove(next(iter(self._charges)))
        return self._sums

    def _remove(self, key: object) -> None:
        _, model, charge = self._charges.pop(key)
        number, charged = self._sums.pop(model)
        if number > 1:
            self._sums[model] = number - 1, charged - charge


class RecentChoices:
    """The models that /mutate has chosen and /validate has not charged yet, in any thread.

    They steer the next choices, so that a burst spreads over the models. They are no charge, and refuse no pod.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._by_namespace = ByNamespace(lambda _namespace: ChargeWindow(CHOICE_SECONDS, clock), clock)

    def add(self, namespace: str, model: str, charge: Charge) -> None:
        """Count a charge on the model chosen for it, for `CHOICE_SECONDS`."""
        with self._lock:
            self._by_namespace[namespace].add(object(), model, charge)

    def release(self, namespace: str, model: str, charge: Charge) -> None:
        """Remove the oldest choice of this model and charge, because it is about to be charged."""
        # A choice has no uid, because /mutate sees a pod before it gets one.
        with self._lock:
            self._by_namespace[namespace].remove_alike(model, charge)

    def on_top_of(self, usages: Mapping[str, Usage], namespace: str) -> Mapping[str, Usage]:
        """Return the usages with all choices counted as used."""
        with self._lock:
            sums = dict(self._by_namespace[namespace].sums())
        if not sums:
            return usages
        with_chosen = dict(usages)
        for model, (_, charge) in sums.items():
            usage = usages.get(model, Usage())
            with_chosen[model] = msgspec.structs.replace(usage, used=usage.used + charge)
        return with_chosen
