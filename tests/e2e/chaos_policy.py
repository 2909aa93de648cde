"""Somebody else's validating webhook, slow and sometimes against it: pods are charged long before they are stored."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.e2e.rest import Json

ASKS = "e2e.vcuda.io/policy"
"""The label of the pods that it is asked about."""

REFUSAL = "refused by another policy"
SLOWEST = 1.5
"""Seconds."""
REFUSED_PART = 0.1


def think(_path: str, review: Json) -> Json:
    """Take a while about a review, and refuse some."""
    time.sleep(random.uniform(0, SLOWEST))  # noqa: S311  # a load
    allowed = random.random() > REFUSED_PART  # noqa: S311  # a load
    return reviewed(review, allowed=allowed, status={"code": 403, "message": REFUSAL})


@contextmanager
def policy(directory: Path, timeout: int) -> Iterator[Json]:
    """The webhook, running, as an item of a configuration; ``directory`` holds its certificate and ``ca.crt``."""
    with answering(think, directory) as url:
        yield asks_about_pods("policy.e2e.vcuda.io", url, directory, ASKS, sideEffects="None", timeoutSeconds=timeout)
