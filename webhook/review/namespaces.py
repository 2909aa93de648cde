"""Finds out whether a namespace exists. Each answer of the API server is cached for a short time."""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from vcuda import errors, kube
from webhook.caches import NamespaceCache

# The cache keeps the answer that a namespace exists, and the answer that it does not, for these numbers of seconds. The
# second time is short, because a pod may be created immediately after its namespace.
FOUND_SECONDS, MISSING_SECONDS = 60.0, 1.0

LOOK_UP_TIMEOUT_SECONDS = 3.0
LOOK_UP_THREADS = 4


class ExistingNamespaces:
    """The namespaces that exist, or existed within the last minute.

    This class is used if callers need no client certificate. Without the check, any client that reaches the port could
    make the webhook create ledgers for invented namespaces.
    """

    def __init__(self, client: kube.Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._threads = ThreadPoolExecutor(LOOK_UP_THREADS, thread_name_prefix="namespaces")
        self._known = NamespaceCache(lambda _namespace: _LookUp(), clock)

    async def check(self, namespace: str) -> None:
        """Raise BadReview if the namespace does not exist, and Unavailable if it could not be looked up."""
        known = self._known[namespace]
        if known.until <= self._clock():
            # All reviews of a namespace share one look-up, so that it takes only one of the few threads.
            if known.call is None or known.call.done():
                known.call = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, namespace)
            try:
                known.exists = await asyncio.wait_for(asyncio.shield(known.call), LOOK_UP_TIMEOUT_SECONDS)
            except TimeoutError:
                raise errors.Unavailable("too many namespaces are being looked up at once; retry") from None
            known.until = self._clock() + (FOUND_SECONDS if known.exists else MISSING_SECONDS)
        if not known.exists:
            raise errors.BadReview(f"namespace {namespace} does not exist")

    def _ask(self, namespace: str) -> bool:
        try:
            self._client.get(f"/api/v1/namespaces/{kube.segment(namespace)}", timeout=LOOK_UP_TIMEOUT_SECONDS)
        except errors.NotFound:
            return False
        return True


class _LookUp(msgspec.Struct):
    exists: bool = False
    until: float = -math.inf
    call: asyncio.Future[bool] | None = None
