"""Lets a test drive watches: a watch catches up with the stored objects as if it had received their events."""

import time
from collections.abc import Callable
from typing import Any

from controller.claims import ClaimInformer
from controller.pods import PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS
from vcuda.kube import LedgerStore, Reflector


def catch_up(reflector: Reflector[Any]) -> None:
    """Bring a watch up to date as if it had received all events. The version of its first list does not change."""
    listed = reflector.listed_version
    reflector.relist()
    reflector.listed_version = listed or reflector.listed_version
    reflector.synced.set()


def claim_informer(
    api: ApiDouble,
    store: LedgerStore,
    on_change: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> ClaimInformer:
    """Return an informer of claims with its informer of pods. Neither has listed yet."""
    return ClaimInformer(api.kube, store, PodInformer(api.kube, LABELS, lambda _: None, clock), on_change, clock)
