"""Informers in tests. No thread updates them: the test updates them from the stored objects."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from controller.claims import ClaimInformer
from controller.metrics import RecountMetrics
from controller.pods import PodInformer
from controller.recount.recounter import Recounter
from tests.api_double import ApiDouble
from tests.builders import LABELS
from vcuda.kube import Kube, LedgerStore, NodeInformer, QuotaInformer, QuotaSource, Reflector


def catch_up(reflector: Reflector[Any]) -> None:
    """Update an informer as if its watch had received all events. This does not change `listed_version`."""
    listed = reflector.listed_version
    reflector.relist()
    reflector.listed_version = listed or reflector.listed_version
    reflector.synced.set()


def unwatched_recounter(
    kube: Kube, store: LedgerStore, **options: Any
) -> tuple[Recounter, QuotaInformer, NodeInformer]:
    """Return a recounter, with its informers of the quota and of nodes. No informer has read any object yet."""
    quota = QuotaInformer(kube, QuotaSource(), frozenset())
    nodes = NodeInformer(kube, LABELS, resources=quota.resources)
    given = {"metrics": RecountMetrics(CollectorRegistry()), "on_report": lambda *_: None, **options}
    return Recounter(kube, store, quota, nodes, **given), quota, nodes


def claim_informer(
    api: ApiDouble,
    store: LedgerStore,
    on_change: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> ClaimInformer:
    """Return an informer of ResourceClaims, with its informer of pods. Neither has read any object yet."""
    return ClaimInformer(api.kube, store, PodInformer(api.kube, LABELS, lambda _: None, clock), on_change, clock)
