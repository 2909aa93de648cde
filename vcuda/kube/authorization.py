"""Distinguishes a missing right from an API server that has just started.

An API server answers requests before its authorizer has read all roles and bindings. Until then it answers 403 even to
requests that the caller may make. On a small, busy machine this lasts 3 s.
"""

import re
import threading
import time
from collections.abc import Callable

GRACE_SECONDS = 10.0
"""For this many seconds after the first 403 for a verb and a resource, the API server may still be starting."""

FORGET_SECONDS = 60.0
"""After this many seconds without a 403 for a verb and a resource, the next 403 counts as the first one."""

# The message of k8s.io/apiserver if its authorizer refuses (forbiddenMessage in
# pkg/endpoints/handlers/responsewriters). A 403 of an admission plugin or a webhook has another message, and a retry
# does not help.
_REFUSED = re.compile(
    r'(?:\S+ (?:"[^"]*" )?is )?forbidden: User "[^"]*" cannot '
    r'(\w+ (?:resource "[^"]*" in API group "[^"]*"|path "[^"]*"))'
)


class AuthorizerGrace:
    """Records when the authorizer refused a verb and a resource to this process. Any thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By verb and resource, the times of the first and the last refusal. A process calls few kinds.
        self._refused: dict[str, tuple[float, float]] = {}

    def covers(self, message: str) -> bool:
        """Record this refusal. Return True if the API server may refuse only because it has just started."""
        found = _REFUSED.match(message)
        if found is None:
            return False
        now, key = self._clock(), found[1]
        with self._lock:
            first, last = self._refused.get(key, (now, now))
            first = now if now - last > FORGET_SECONDS else first
            self._refused[key] = first, now
        return now - first < GRACE_SECONDS
