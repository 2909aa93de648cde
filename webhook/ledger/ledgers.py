"""The interface of the ledgers, which record the GPU charges of namespaces, and ledgers in the memory of a process.

This module also has three classes for reviews. `ReviewDeadline` is the deadline of an admission review. `RecentChoices`
has the GPU models that /mutate has chosen recently. `SkippedMutate` has the namespaces whose pods lack its patch.
"""

import math
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from vcuda.errors import Dropped, DropReason, VcudaError
from vcuda.ledger.ledger import MAX_PENDING, Admitted, Ledger, Pending, Rejected, admit
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Shortage, Usage


class TooManySteps(VcudaError):
    """The event loop must not decide this review, because the decision takes too long."""


class ReviewDeadline:
    """The deadline of an admission review, and whether the caller still waits. Threads may share this object.

    ``steps``: the steps of the decision that the present thread may still do.
    """

    def __init__(self, end: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = end
        self.charging = False
        self.steps: float = math.inf
        self._clock = clock
        self._abandoned = False

    @classmethod
    def after(cls, seconds: float) -> "ReviewDeadline":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return self.end - self._clock()

    def abandon(self) -> None:
        self._abandoned = True

    def keep(self) -> None:
        """Record that the charge of this review may be written from now on. After this call, `check` never raises."""
        self.charging = True

    def check(self, steps: int = 0, /) -> None:
        """Raise Dropped if the deadline has passed or the caller has disconnected, but never after a call of `keep`.

        Long work on a review must call this method again and again, so that it stops when nobody waits for the answer.
        Work that grows with a product of two numbers must first give the number of its ``steps``. Raises TooManySteps
        if the steps of a review are more than ``self.steps``.
        """
        if steps and not self.charging:
            self.steps -= steps
            if self.steps < 0:
                raise TooManySteps
        # The usual case comes first, because a review of a large pod calls this method tens of thousands of times.
        if self.charging or (not self._abandoned and self._clock() < self.end):
            return
        if self._abandoned:
            raise Dropped("the caller of this review has disconnected", DropReason.DISCONNECTED)
        raise Dropped("the deadline of this review has passed", DropReason.LATE)


class RetryLater(msgspec.Struct, frozen=True):
    """The charge was not decided, for example because too many charges are pending. The caller must retry."""

    reason: str
    """Why the charge was not decided, as a sentence without a full stop. The creator of the pod gets this text."""
    soon: bool = False
    """True if a retry within 2 s is expected to succeed."""


class PutOff(msgspec.Struct, frozen=True):
    """The charge does not fit the ledger now, but may fit later. The caller must retry."""

    shortages: tuple[Shortage, ...]
    """For each GPU model that was tried, the quota that is missing according to the ledger."""
    soon: bool = False
    """True if the missing quota is expected to be free within 2 s."""
    counted: bool = True
    """False if the stored pods and claims could not be counted before the deadline."""


Decision = Admitted | Rejected | PutOff | RetryLater

CROWDED = RetryLater(f"{MAX_PENDING} admitted pods and claims of this namespace are not seen stored yet")


class ChargeRequest(msgspec.Struct, frozen=True):
    """A request to charge one pod or claim to the ledger of its namespace."""

    namespace: str
    uid: str
    """The uid of the pod or claim."""
    model: str
    charge: Charge
    quota: NamespaceQuota
    deadline: float
    """The deadline for the decision, in seconds of the monotonic clock."""
    counted_since: str = ""
    """The resourceVersion of the quota ConfigMap with ``quota``. A ledger that was counted before this version may lack
    pods that were stored while the namespace had no limit."""
    dry_run: bool = False
    created: float = math.inf
    """The creationTimestamp of the pod or claim, in Unix seconds; infinity if the timestamp is unknown. A charge with
    an unknown timestamp is never admitted from a reservation."""
    grace: int = 0
    """The grace period of the pod in seconds; 0 if the period is so short that the ledger need not record it."""

    def decide(self, ledger: Ledger) -> Decision:
        """Decide whether the charge fits this ledger. An `Admitted` has the ledger that the caller must write."""
        asked = Pending(self.model, self.charge, self.grace)
        decision = admit(ledger, self.uid, asked, self.quota, enforced=self.quota.mode is Mode.ENFORCE)
        return decision if isinstance(decision, Admitted | Rejected) else CROWDED


class Ledgers(Protocol):
    """The ledgers of all namespaces. All calls of one instance must come from the same event loop."""

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge, and record it if it is admitted. A second call for the same uid charges nothing more.

        A dry run records nothing. Raises Unavailable if the store of the ledgers does not answer. The charge may then
        be recorded or not.
        """

    async def usage(self, namespace: str, seconds: float | None = None) -> Mapping[str, Usage]:
        """Return the usage of the namespace by GPU model. Models without a charge are left out.

        Raises Unavailable if the store of the ledgers does not answer, or not within ``seconds``.
        """

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return the usage by GPU model, up to some seconds old. The caller must not reject a pod because of it."""

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return the usage by GPU model: all stored pods and claims, and the terminating charges in ``charged``.

        Terminating charges belong to deleted pods that may still run. A rejection may depend on this usage. Return None
        if the count does not end before the deadline. Raises Unavailable if the store does not answer.
        """

    async def close(self) -> None:
        """Write all admitted charges that are not written yet. The caller must have stopped answering reviews."""


MAX_KNOWN_NAMESPACES = 10_000
"""The maximum number of namespaces for which `ByNamespace` keeps a value. Without a maximum, callers with invented
namespaces could use up the memory."""

IDLE_SECONDS = 600.0
"""`ByNamespace` drops the value of a namespace that was not used for this many seconds. Such a value is out of date."""

TOO_MANY_NAMESPACES = RetryLater("too many namespaces have a ledger in memory")

V = TypeVar("V")


class ByNamespace(Generic[V]):
    """A cache with one value per namespace. It makes a missing value, and drops values that were not used for long."""

    def __init__(self, make: Callable[[str], V], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        # Maps each namespace to its cached value and the time of the last use, beginning with the least recent use.
        self._kept: dict[str, tuple[V, float]] = {}

    def values(self) -> list[V]:
        return [value for value, _ in self._kept.values()]

    def __getitem__(self, namespace: str) -> V:
        now = self._clock()
        while self._kept and next(iter(self._kept.values()))[1] + IDLE_SECONDS < now:
            del self._kept[next(iter(self._kept))]
        value = self._kept.pop(namespace)[0] if namespace in self._kept else self._make(namespace)
        self._kept[namespace] = value, now
        if len(self._kept) > MAX_KNOWN_NAMESPACES:
            del self._kept[next(iter(self._kept))]
        return value


class MemoryLedgers:
    """Ledgers in the memory of this process, for `serve --standalone`, the demo and the command `check`."""

    def __init__(self, committed: Mapping[str, Mapping[str, Charge]] = types.MappingProxyType({})) -> None:
        self._ledgers = {namespace: Ledger(committed=taken) for namespace, taken in committed.items()}

    async def charge(self, request: ChargeRequest) -> Decision:
        # No lock is needed, because this coroutine awaits nothing between reading and replacing the ledger.
        if request.namespace not in self._ledgers and len(self._ledgers) >= MAX_KNOWN_NAMESPACES:
            return TOO_MANY_NAMESPACES
        decision = request.decide(self._ledgers.get(request.namespace, Ledger()))
        if isinstance(decision, Admitted) and not request.dry_run:
            self._ledgers[request.namespace] = _oldest_committed(decision.ledger)
        return decision

    async def usage(self, namespace: str, _seconds: float | None = None) -> Mapping[str, Usage]:
        return self._ledgers.get(namespace, Ledger()).usages()

    cached_usage = usage

    async def stored_usage(
        self, _namespace: str, charged: Mapping[str, Usage], _deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return ``charged``, because ledgers in memory have no stored pods and claims that could be counted."""
        return charged

    async def close(self) -> None:
        """Do nothing, because ledgers in memory are never written to a store."""


def _oldest_committed(ledger: Ledger) -> Ledger:
    # On a cluster, the controller moves the charges of stored pods from `pending` to `committed`. No controller does so
    # for ledgers in memory. So if `pending` is full, move the oldest charge to make room for a new charge.
    if len(ledger.pending) < MAX_PENDING:
        return ledger
    uid, oldest = next(iter(ledger.pending.items()))
    committed = {**ledger.committed, oldest.model: ledger.committed.get(oldest.model, Charge()) + oldest.charge}
    pending = {other: entry for other, entry in ledger.pending.items() if other != uid}
    return msgspec.structs.replace(ledger, committed=committed, pending=pending)


# A GPU model that /mutate chose for a pod counts as used for this many seconds. Within this time the API server calls
# /validate, even if other webhooks run in between. If this replica has not charged the pod by then, another replica has
# charged the pod, or another webhook has rejected the pod.
CHOICE_SECONDS = 2.0


SKIPPED_SECONDS = 30.0
"""The time for which a namespace's pods without a trace of /mutate are retried. A replica is replaced within it. After
as long a time without such a pod, the next one is retried again."""


class ChargeWindow:
    """The charges of the last ``seconds``, and their number and sum for each GPU model. For use by one thread only."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        # Maps each key to the time, the model and the amount of its charge. The oldest charge comes first.
        self._charges: OrderedDict[object, tuple[float, str, Charge]] = OrderedDict()
        # Maps each GPU model to the number and sum of its charges. The sums are stored, because adding up thousands of
        # charges for each review would take too long.
        self._sums: dict[str, tuple[int, Charge]] = {}

    def add(self, key: object, model: str, charge: Charge) -> None:
        """Add a charge at the present time, unless a charge with this key was added in the last ``seconds``."""
        sums = self.sums()
        if key not in self._charges:
            number, charged = sums.get(model, (0, Charge()))
            self._sums[model] = number + 1, charged + charge
            self._charges[key] = self._clock(), model, charge

    def remove_alike(self, model: str, charge: Charge) -> None:
        self.sums()
        alike = (key for key, (_, own, amount) in self._charges.items() if (own, amount) == (model, charge))
        if (oldest := next(alike, None)) is not None:
            self._remove(oldest)

    def sums(self) -> Mapping[str, tuple[int, Charge]]:
        """Return the number and sum of the charges by model, after the removal of charges older than ``seconds``."""
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
    """The GPU models that /mutate has chosen for pods that /validate has not charged yet. Thread-safe.

    When /mutate chooses a model for the next pod, it counts these choices as used. So a burst of pods spreads over the
    models. A choice is not a charge: no pod is rejected because of a choice.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._by_namespace = ByNamespace(lambda _namespace: ChargeWindow(CHOICE_SECONDS, clock), clock)

    def add(self, namespace: str, model: str, charge: Charge) -> None:
        """Record that this model was chosen for a pod with this charge. The record lasts for `CHOICE_SECONDS`."""
        with self._lock:
            self._by_namespace[namespace].add(object(), model, charge)

    def release(self, namespace: str, model: str, charge: Charge) -> None:
        """Remove the oldest choice with this model and charge. The caller must charge the pod next."""
        # A choice is identified by model and charge, because the pod had no uid at /mutate.
        with self._lock:
            self._by_namespace[namespace].remove_alike(model, charge)

    def on_top_of(self, usages: Mapping[str, Usage], namespace: str) -> Mapping[str, Usage]:
        """Return the given usages by model, plus the charges of the recent choices in this namespace."""
        with self._lock:
            sums = dict(self._by_namespace[namespace].sums())
        if not sums:
            return usages
        with_chosen = dict(usages)
        for model, (_, charge) in sums.items():
            usage = usages.get(model, Usage())
            with_chosen[model] = msgspec.structs.replace(usage, used=usage.used + charge)
        return with_chosen


class SkippedMutate:
    """The namespaces in which /validate has lately seen a pod for which /mutate was not called. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        # Maps each namespace to the times of the first and of the last such pod.
        self._seen = ByNamespace(lambda _namespace: [clock()] * 2, clock)

    def may_pass(self, namespace: str) -> bool:
        """Record such a pod, and return True until `SKIPPED_SECONDS` after the first such pod of an unbroken series."""
        with self._lock:
            seen, now = self._seen[namespace], self._clock()
            seen[:] = now if now - seen[1] > SKIPPED_SECONDS else seen[0], now
            return now - seen[0] < SKIPPED_SECONDS
