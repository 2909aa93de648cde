"""The work queue and the loop that every part of the leader runs on: one key at a time, and again when it is due.

The idea is that of client-go's ``util/workqueue`` and controller-runtime's ``Reconciler``: events only say which key
to look at, so many of them cost one look, and a look that was missed is made up for by the next.
"""

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

import structlog

from vcuda import errors, k8s_types
from vcuda.kube import Backoff

# Between two turns of one key, at least, where a loop has no other: events that come thick share one.
MIN_INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 5.0  # after which a key whose look failed is tried again at first, where a loop has no other
MAX_RETRY_SECONDS = 10.0  # to this the delay between two tries of one key grows, where it does not begin above


class WorkQueue:
    """Keys with the time when each is due, in seconds of the monotonic clock; each stands in it once.

    ``min_interval`` is the least time between two turns of one key: events in between share the later one.
    """

    def __init__(self, min_interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_interval = min_interval
        self._clock = clock
        self._due_at: dict[str, float] = {}
        # A key that is added for an earlier time has its later entry left in the heap: taking it out would cost a scan.
        self._heap: list[tuple[float, int, str]] = []
        self._number = itertools.count()
        self._last_turn: dict[str, float] = {}
        # Since when the keys were due whose turn has not ended, or has come to nothing; and those that said so.
        self._unserved: dict[str, float] = {}
        self._retried: set[str] = set()
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: str, delay: float = 0.0, interval: float | None = None) -> None:
        """Let a key be due after ``delay`` seconds, or sooner if it is already.

        ``interval`` is the least time since its last turn, where that is to be another than the queue's own.
        """
        now = self._clock()
        with self._changed:
            apart = self._min_interval if interval is None else interval
            at = max(now + delay, self._last_turn.get(key, -math.inf) + apart)
            if at < self._due_at.get(key, math.inf):
                self._due_at[key] = at
                heapq.heappush(self._heap, (at, next(self._number), key))
                self._changed.notify()

    def retry(self, key: str, delay: float) -> None:
        """Let a key be due after ``delay`` seconds, and not before, as its last turn came to nothing.

        That turn does not count for the interval.
        """
        with self._changed:
            self._last_turn[key] = self._clock() + delay - self._min_interval
            self._retried.add(key)
        self.add(key, delay)

    def is_active(self, key: str) -> bool:
        """Return whether a key waits for its turn, or had one within the last two intervals."""
        with self._changed:
            recent = self._clock() < self._last_turn.get(key, -math.inf) + 2 * self._min_interval
            return key in self._due_at or recent

    def served(self, key: str) -> None:
        """Take note that a key's turn has ended; unless it was to be tried again it came to something."""
        with self._changed:
            if key not in self._retried:
                self._unserved.pop(key, None)
            self._retried.discard(key)

    def lag(self) -> float:
        """Return for how many seconds the key that has waited longest was due without a turn that came to something."""
        with self._changed:
            key = self._earliest()
            due = (*self._unserved.values(), *(() if key is None else (self._due_at[key],)))
            return max(self._clock() - min(due), 0.0) if due else 0.0

    def close(self) -> None:
        """End every `next` from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> str | None:
        """Block until a key is due, and return it; None when closed."""
        with self._changed:
            while not self._closed:
                key = self._earliest()
                now = self._clock()
                if key is not None and self._due_at[key] <= now:
                    self._unserved.setdefault(key, self._due_at.pop(key))
                    heapq.heappop(self._heap)
                    if self._min_interval:  # without one nobody asks when the last turn was
                        self._last_turn[key] = now
                    return key
                self._changed.wait(None if key is None else self._due_at[key] - now)
            return None

    def _earliest(self) -> str | None:
        while self._heap:
            at, _, key = self._heap[0]
            if self._due_at.get(key) == at:
                return key
            heapq.heappop(self._heap)
        return None


class Reconciler:
    """Serves the keys of its queue, one after the other, until it is stopped.

    ``reconcile`` looks at one key, and returns in how many seconds to look again, or None: when something adds it. It
    may be called at any time, as often as one likes. Where the API server refuses it or does not answer, or an object
    cannot be decoded, that key alone is tried again, first within ``retry_seconds``, later less and less often; the
    warning ``failure`` has the key by ``key_name``. Any other error is a fault of ours: it ends `run`.
    """

    def __init__(
        self,
        name: str,
        reconcile: Callable[[str], float | None],
        *,
        failure: str,
        retry_seconds: float | None = None,
        min_interval: float | None = None,
        key_name: str = "namespace",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.queue = WorkQueue(MIN_INTERVAL_SECONDS if min_interval is None else min_interval, clock)
        self._reconcile = reconcile
        self._failure = failure
        self._key_name = key_name
        self._retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds
        self._clock = clock
        self._backoffs: dict[str, Backoff] = {}
        self._last_turn_ended: float | None = None
        self._log = structlog.get_logger()

    def run(self) -> None:
        """Serve whatever is due until stopped."""
        self._last_turn_ended = self._clock()
        while (key := self.queue.next()) is not None:
            self.turn(key)

    def turn(self, key: str) -> None:
        """Look at one key now."""
        try:
            again = self._reconcile(key)
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:
            # Anybody may write an object that cannot be decoded: that must not end the loop for all others.
            again = self._backoff(key).next()
            self._log.warning(self._failure, **{self._key_name: key}, error=str(error))
        else:
            self._backoffs.pop(key, None)
            self.queue.served(key)
        if again is not None:
            self.queue.add(key, again)
        self._last_turn_ended = self._clock()

    def stop(self) -> None:
        """Begin no turn any more; one that has begun comes to its end."""
        self.queue.close()

    def is_stuck(self, seconds: float) -> bool:
        """Return whether it runs, and has not ended a turn for so long; a turn that failed has ended too.

        It says something only of a loop that always has a turn within that time.
        """
        return self._last_turn_ended is not None and self._clock() - self._last_turn_ended > seconds

    def _backoff(self, key: str) -> Backoff:
        longest = max(self._retry_seconds, MAX_RETRY_SECONDS)
        return self._backoffs.setdefault(key, Backoff(self._retry_seconds, longest))


def spawn(name: str, loop: Callable[[], None], on_fault: Callable[[], None]) -> threading.Thread:
    """Run a loop in a thread; ``on_fault`` is called when it ends by a fault of its own, as nobody would see that."""

    def guarded() -> None:
        try:
            loop()
        except Exception:  # noqa: BLE001  # it is logged, and whoever hears of the fault ends the process
            structlog.get_logger().exception("loop ended by a fault of its own", loop=name)
            on_fault()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
