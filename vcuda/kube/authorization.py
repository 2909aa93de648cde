"""Tells a missing right from an API server that has just started.

An API server answers requests before its authorizer has read all roles and bindings. Until then it refuses requests
that the caller may make. This takes 3 s on a small, busy machine.
"""

import re
import threading
import time
from collections.abc import Callable

GRACE_SECONDS = 10.0
"""Time after the first refusal of a verb and a resource for which the API server may still be starting."""

FORGET_SECONDS = 60.0
"""A refusal so long after the last one of the same verb and resource counts as the first one again."""

# The sentence of k8s.io/apiserver (forbiddenMessage in pkg/endpoints/handlers/responsewriters). Refusals by admission
# plugins and webhooks, whose 403 never passes by itself, have other sentences.
_REFUSED = re.compile(
    r'(?:\S+ (?:"[^"]*" )?is )?forbidden: User "[^"]*" cannot '
    r'(\w+ (?:resource "[^"]*" in API group "[^"]*"|path "[^"]*"))'
)


class AuthorizerGrace:
    """Notes the authorizer's refusals of one process, by verb and resource, for all threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # The times of the first and the last refusal. There are few keys, because a process uses few resources.
        self._refused: dict[str, tuple[float, float]] = {}

    def covers(self, message: str) -> bool:
        """Note the refusal with this message. Return whether it may pass because the API server has just started."""
        found = _REFUSED.match(message)
        if found is None:
            return False
        now, key = self._clock(), found[1]
        with self._lock:
            first, last = self._refused.get(key, (now, now))
            first = now if now - last > FORGET_SECONDS else first
            self._refused[key] = first, now
        return now - first < GRACE_SECONDS
