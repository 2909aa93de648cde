"""The work queue and the reconcile loop that every duty of the leader uses. A loop reconciles one key at a time.

The queue is like client-go's ``util/workqueue``, and the loop like controller-runtime's ``Reconciler``. An event only
names the key, for example a namespace. One reconciliation of this key, called a turn, can serve many events. If an
event is missed, a later turn does its work.
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

# By default, a key is reconciled at most once in this many seconds, so that frequent events share a reconciliation.
MIN_INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 10.0  # The maximum delay between retries, unless the first delay is already longer.
FORGET_SECONDS = 60.0  # A key's last turn is forgotten after this time, and after two minimum intervals.


class WorkQueue:
    """A queue of keys. Each key is in the queue at most once, with the time on the monotonic clock when it is due.

    ``min_interval``: the minimum seconds between two turns (reconciliations) of a key. Events in between share a turn.
    """

    def __init__(self, min_interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_interval = min_interval
        self._clock = clock
        self._due_at: dict[str, float] = {}
        # When a key becomes due earlier, its old entry stays in the heap, because a removal would need a scan of the
        # whole heap. `_earliest` skips such old entries.
        self._heap: list[tuple[float, int, str]] = []
        self._number = itertools.count()
        self._last_turn: dict[str, float] = {}
        self._forget_at = -math.inf
        # `_unserved`: the keys whose reconciliation has begun but not succeeded, each with the time when it became due.
        # `_retried`: the keys whose current reconciliation has queued a retry.
        self._unserved: dict[str, float] = {}
        self._retried: set[str] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._held = False

    def add(self, key: str, delay: float = 0.0, interval: float | None = None) -> None:
        """Make a key due after ``delay`` seconds. If the key is already due earlier, change nothing.

        ``interval``: the minimum seconds since the key was last reconciled; None for the queue's ``min_interval``.
        """
        now = self._clock()
        with self._changed:
            if self._held:
                return
            apart = self._min_interval if interval is None else interval
            at = max(now + delay, self._last_turn.get(key, -math.inf) + apart)
            if at < self._due_at.get(key, math.inf):
                self._due_at[key] = at
                heapq.heappush(self._heap, (at, next(self._number), key))
                self._changed.notify()

    def retry(self, key: str, delay: float) -> None:
        """Make a key due after ``delay`` seconds and not earlier, because its current reconciliation failed.

        This retry may come before the minimum interval between two reconciliations of the key is over.
        """
        with self._changed:
            self._last_turn[key] = self._clock() + delay - self._min_interval
            self._retried.add(key)
            self._due_at.pop(key, None)  # An event during the reconciliation may have made the key due at once.
        self.add(key, delay)

    def is_active(self, key: str) -> bool:
        """Return True if a key waits to be reconciled, or was reconciled less than two minimum intervals ago."""
        with self._changed:
            recent = self._clock() < self._last_turn.get(key, -math.inf) + 2 * self._min_interval
            return key in self._due_at or recent

    def served(self, key: str) -> None:
        """Record that a key's reconciliation has ended. After a call of `retry`, the key still counts as overdue."""
        with self._changed:
            if key not in self._retried:
                self._unserved.pop(key, None)
            self._retried.discard(key)

    def lag(self) -> float:
        """Return the longest time, in seconds, for which a key has been due without a successful reconciliation."""
        with self._changed:
            key = self._earliest()
            due = (*self._unserved.values(), *(() if key is None else (self._due_at[key],)))
            return max(self._clock() - min(due), 0.0) if due else 0.0

    def hold(self) -> None:
        """Remove all keys, and ignore new keys until `release`, because another replica reconciles them now."""
        with self._changed:
            self._held = True
            for kept in (self._due_at, self._heap, self._unserved, self._retried):
                kept.clear()

    def release(self) -> None:
        """Accept keys again. The caller must add all keys, because keys that were added since `hold` are lost."""
        with self._changed:
            self._held = False

    def close(self) -> None:
        """Close the queue: from now on, every call of `next` returns None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> str | None:
        """Block until a key is due, and return the key. Return None if the queue is closed."""
        with self._changed:
            while not self._closed:
                key = self._earliest()
                now = self._clock()
                if key is not None and self._due_at[key] <= now:
                    self._unserved.setdefault(key, self._due_at.pop(key))
                    heapq.heappop(self._heap)
                    if self._min_interval:  # Without a minimum interval, `_last_turn` would only use memory.
                        self._last_turn[key] = now
                    self._forget_turns(now)
                    return key
                self._changed.wait(None if key is None else self._due_at[key] - now)
            return None

    def _forget_turns(self, now: float) -> None:
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            recent = now - FORGET_SECONDS - 2 * self._min_interval
            self._last_turn = {key: at for key, at in self._last_turn.items() if at > recent}

    def _earliest(self) -> str | None:
        while self._heap:
            at, _, key = self._heap[0]
            if self._due_at.get(key) == at:
                return key
            heapq.heappop(self._heap)
        return None


class Reconciler:
    """Reconciles the keys of its queue, one after the other, until it is stopped.

    ``reconcile``: reconciles one key. It returns the seconds until the next call, or None to wait for an event.
    It must be safe to call at any time, and any number of times.
    ``retry_seconds``: the delay of a key's first retry. Later delays are longer. A key is retried if the API server
    rejects a call or does not answer, or if an object cannot be decoded. Any other exception is a bug, and ends `run`.
    ``failure``: the text of the log warning about a failed reconciliation.
    ``key_name``: the name of the log field with the key.
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
        self._last_turn_ended = self._clock()
        while (key := self.queue.next()) is not None:
            self.turn(key)

    def turn(self, key: str) -> None:
        try:
            again = self._reconcile(key)
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:
            # An object that a tenant has made undecodable must not end the loop for all other keys.
            longest = max(self._retry_seconds, MAX_RETRY_SECONDS)
            again = self._backoffs.setdefault(key, Backoff(self._retry_seconds, longest)).next()
            self._log.warning(self._failure, **{self._key_name: key}, error=str(error))
        else:
            self._backoffs.pop(key, None)
            self.queue.served(key)
        if again is not None:
            self.queue.add(key, again)
        self._last_turn_ended = self._clock()

    def stop(self) -> None:
        """Make `run` return after the current reconciliation."""
        self.queue.close()

    def is_stuck(self, seconds: float) -> bool:
        """Return True if `run` was called and no reconciliation, not even a failed one, has ended for ``seconds``.

        The result is only meaningful for a loop that normally ends a reconciliation within this time.
        """
        return self._last_turn_ended is not None and self._clock() - self._last_turn_ended > seconds


def spawn(name: str, loop: Callable[[], None], on_fault: Callable[[], None]) -> threading.Thread:
    """Run ``loop`` in a new daemon thread. If ``loop`` raises an exception, log it and call ``on_fault``."""

    def guarded() -> None:
        try:
            loop()
        except Exception:  # noqa: BLE001  # Every error in the loop is logged, and ``on_fault`` is called.
            structlog.get_logger().exception("a loop of the controller ended by an error", loop=name)
            on_fault()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
