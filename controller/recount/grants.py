"""Queues a recount of a namespace when a grant (a dated addition to a limit) begins, ends, or will end in a day."""

from collections.abc import Callable, Iterable

from controller.workqueue import Reconciler
from vcuda.kube import QuotaInformer
from vcuda.quota.model import Quota

NOTICE_SECONDS = 24 * 3600.0
"""Seconds before the end of a grant at which Events announce the end."""

MAX_WAIT_SECONDS = 30.0
"""Maximum seconds between two reads of the wall clock, because an administrator may change the clock."""

KEY = "grants"
"""The only key of the work queue, because one check covers all grants."""


class GrantFollower:
    """Compares the wall clock with the beginnings and ends of all grants.

    ``namespaces``: returns the known namespaces. ``recount``: queues a recount of a namespace's charges.
    """

    def __init__(
        self, quota: QuotaInformer, namespaces: Callable[[], Iterable[str]], recount: Callable[[str], None]
    ) -> None:
        self.reconciler = Reconciler("grants", self.reconcile, failure="ends of grants not checked", key_name="of")
        self._quota = quota
        self._namespaces = namespaces
        self._recount = recount
        self._seen: float | None = None

    def reconcile(self, _key: str) -> float | None:
        """Queue a recount of every namespace with grants, if a grant has begun or ended, or will end in a day.

        Return the seconds until the next call; None if there are no grants.
        """
        read, now = self._quota.in_force(), self._quota.clock.seconds()
        if read is None or not read.quota.times:
            return None
        seen, self._seen = now if self._seen is None else self._seen, now
        # If the wall clock was set back (`now < seen`), any grant may have begun or ended.
        if now < seen or _next(read.quota, seen) <= now:
            self._recount_dated()
        return min(_next(read.quota, now) - now, MAX_WAIT_SECONDS)

    def _recount_dated(self) -> None:
        quota = self._quota.current()
        for namespace in self._namespaces():
            limits = quota.for_namespace(namespace) if quota else None
            team = quota.teams[limits.team.name] if quota and limits and limits.team else None
            if limits and (limits.grants or (team and team.grants)):
                self._recount(namespace)


def _next(quota: Quota, moment: float) -> float:
    """Return the next time, after ``moment``, at which a grant begins or ends, or will begin or end in one day."""
    return min(quota.next_change(moment), quota.next_change(moment + NOTICE_SECONDS) - NOTICE_SECONDS)
