"""Has namespaces settled when their grants begin or end, and a day before a grant ends."""

from collections.abc import Callable, Iterable

from controller.workqueue import Reconciler
from vcuda.kube import QuotaInformer
from vcuda.quota.model import Quota

NOTICE_SECONDS = 24 * 3600.0
"""How long before the end of a grant its namespace is reported, so that Events can announce the end."""

MOST_SECONDS = 30.0
"""Longest time between two looks at the clock, which may be set meanwhile."""

KEY = "grants"
"""The only key of the queue."""


class GrantFollower:
    """Compares the clock with the times of all grants.

    ``namespaces``: returns the known namespaces. ``settle``: has one settled, which reports it.
    """

    def __init__(
        self, quota: QuotaInformer, namespaces: Callable[[], Iterable[str]], settle: Callable[[str], None]
    ) -> None:
        self.reconciler = Reconciler("grants", self.reconcile, failure="grants not followed", key_name="of")
        self._quota = quota
        self._namespaces = namespaces
        self._settle = settle
        self._seen: float | None = None

    def reconcile(self, _key: str) -> float | None:
        """Have the namespaces with grants settled if one has begun or ended, or is about to end.

        Return the seconds until the next look; None if there are no grants.
        """
        read, now = self._quota.in_force(), self._quota.clock.seconds()
        if read is None or not read.quota.times:
            return None
        seen, self._seen = now if self._seen is None else self._seen, now
        # A clock that was set back may have passed any number of changes.
        if now < seen or _next(read.quota, seen) <= now:
            self._settle_dated()
        return min(_next(read.quota, now) - now, MOST_SECONDS)

    def _settle_dated(self) -> None:
        quota = self._quota.current()
        for namespace in self._namespaces():
            limits = quota.for_namespace(namespace) if quota else None
            if limits and limits.grants:
                self._settle(namespace)


def _next(quota: Quota, moment: float) -> float:
    """Return the first moment after this one at which a grant begins or ends, or is about to."""
    return min(quota.next_change(moment), quota.next_change(moment + NOTICE_SECONDS) - NOTICE_SECONDS)
