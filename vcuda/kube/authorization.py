"""Distinguishes two causes of a 403: an RBAC permission is missing, or the API server has just started.

An API server answers requests before its authorizer has read all roles and bindings. Until then the API server answers
403 even to requests that the roles permit. On a small, busy machine this lasts 3 s.
"""

import re
import threading
import time
from collections.abc import Callable

GRACE_SECONDS = 10.0
"""If a 403 for one verb and resource repeats for longer than this many seconds, an RBAC permission is missing."""

FORGET_SECONDS = 60.0
"""If a verb and resource get no 403 for this many seconds, the next 403 starts a new period of `GRACE_SECONDS`."""

# Matches the message of a 403 from the authorizer of the API server (forbiddenMessage in k8s.io/apiserver,
# pkg/endpoints/handlers/responsewriters). A 403 from an admission plugin or a webhook has another message, and would
# be repeated at each retry.
_REJECTED = re.compile(
    r'(?:\S+ (?:"[^"]*" )?is )?forbidden: User "[^"]*" cannot '
    r'(\w+ (?:resource "[^"]*" in API group "[^"]*"|path "[^"]*"))'
)


class AuthorizerGrace:
    """Decides whether a 403 may come from an API server that has just started. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Maps the few verbs and resources that this process uses to the times of their first and last 403.
        self._rejected: dict[str, tuple[float, float]] = {}

    def covers(self, message: str) -> bool:
        """Record a 403 with this ``message``. Return True if the cause may be an API server that has just started."""
        found = _REJECTED.match(message)
        if found is None:
            return False
        now, key = self._clock(), found[1]
        with self._lock:
            first, last = self._rejected.get(key, (now, now))
            first = now if now - last > FORGET_SECONDS else first
            self._rejected[key] = first, now
        return now - first < GRACE_SECONDS
