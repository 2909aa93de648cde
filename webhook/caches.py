"""Caches of the webhook with one value per namespace. Each value is kept for a short time."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from vcuda.errors import cut
from vcuda.quota.model import Charge, Usage

V = TypeVar("V")

MAX_KNOWN_NAMESPACES = 10_000
"""The maximum number of namespaces for which `NamespaceCache` keeps a value. Without a maximum, callers with invented
namespaces could use up the memory."""

IDLE_SECONDS = 600.0
"""`NamespaceCache` drops a value that was not used for this many seconds. Such a value is out of date."""

# A GPU model that /mutate chose for a pod counts as used for this many seconds. Within this time the API server calls
# /validate, even if other webhooks run in between. If this replica has not charged the pod by then, another replica has
# charged the pod, or another webhook has rejected the pod.
CHOICE_SECONDS = 2.0

SKIPPED_SECONDS = 30.0
"""Seconds for which pods without a trace of /mutate are retried, in which a replica can be replaced. The time begins
with the first such pod of a namespace. It begins again after as many seconds without such a pod."""

MAX_FAILURE_LENGTH = 500
"""The maximum length of the text of a failure of /mutate in a rejection by /validate."""


class NamespaceCache(Generic[V]):
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
        self._by_namespace = NamespaceCache(lambda _namespace: ChargeWindow(CHOICE_SECONDS, clock), clock)

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
    """The namespaces in which /validate has lately seen a pod for which /mutate was not called, or in which /mutate of
    this replica has lately failed. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        # Maps each namespace to the times of the first and of the last pod for which /mutate was not called.
        self._seen = NamespaceCache(lambda _namespace: [clock()] * 2, clock)
        self._failures: NamespaceCache[list[tuple[float, str]]] = NamespaceCache(lambda _namespace: [], clock)

    def may_pass(self, namespace: str) -> bool:
        """Record a pod without /mutate. Return True until `SKIPPED_SECONDS` after the first pod of its series."""
        with self._lock:
            seen, now = self._seen[namespace], self._clock()
            seen[:] = now if now - seen[1] > SKIPPED_SECONDS else seen[0], now
            return now - seen[0] < SKIPPED_SECONDS

    def add_failure(self, namespace: str, error: Exception) -> None:
        """Record a failure of /mutate in this replica. It changes nothing but the text of later rejections."""
        with self._lock:
            self._failures[namespace][:] = [(self._clock(), cut(str(error), MAX_FAILURE_LENGTH))]

    def failure(self, namespace: str) -> str:
        """Return the last failure of /mutate within `SKIPPED_SECONDS`; empty if there was none."""
        with self._lock:
            found = self._failures[namespace]
            return found[0][1] if found and self._clock() - found[0][0] < SKIPPED_SECONDS else ""
