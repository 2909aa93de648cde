"""Publishes the numbers of free cards (GPUs) in a ConfigMap for the webhook, and the metrics of the extender."""

import time
from collections.abc import Callable, Iterable

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards
from vcuda.errors import NotFound, VcudaError
from vcuda.kube import Kube, segment, upsert
from vcuda.placement.free_cards import CARDS_CONFIG_MAP, CARDS_KEY, FreeCards, FreeCardsByPool, write_free_cards
from vcuda.placement.nodes import Nodes

MIN_INTERVAL_SECONDS = 3.0
"""The least number of seconds between two writes of the ConfigMap with the numbers of free cards."""

# Writes of unchanged numbers cost little, because the API server ignores a patch that changes nothing.
REPEAT_SECONDS = 60.0
"""After this many seconds, unchanged numbers of free cards are written again, in case somebody has edited them."""

_LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota"}


class CardsPublisher:
    """Writes the numbers of free cards into a ConfigMap for the webhook. ``clock``: returns seconds.

    The published numbers may be some seconds old. From them, the webhook chooses only which GPU model to try first.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        free_cards: Callable[[], FreeCardsByPool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._free_cards = free_cards
        self._clock = clock
        self._written: str | None = None
        self._repeat_at = 0.0

    def publish(self) -> None:
        """Write the numbers of free cards if they have changed, or after a minute. Raises VcudaError."""
        text, now = write_free_cards(self._free_cards()), self._clock()
        if text == self._written and now < self._repeat_at:
            return
        metadata = {"name": CARDS_CONFIG_MAP, "labels": _LABELS}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CARDS_KEY: text}}
        upsert(self._kube, _collection(self._namespace), config_map)
        self._written, self._repeat_at = text, now + REPEAT_SECONDS


def delete_published(kube: Kube, namespace: str) -> None:
    """Delete the ConfigMap with an earlier leader's numbers of free cards. If the deletion fails, log the error."""
    # Without an extender, nobody updates the published numbers, and outdated numbers would mislead the webhook.
    log = structlog.get_logger()
    try:
        kube.delete(f"{_collection(namespace)}/{CARDS_CONFIG_MAP}")
    except NotFound:
        return
    except VcudaError as error:
        log.warning("the outdated numbers of free cards could not be deleted", error=str(error))
    else:
        log.info("the numbers of free cards were deleted, because no extender is configured")


def _collection(namespace: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/configmaps"


def count_free(node_cards: NodeCards, nodes: Nodes) -> FreeCardsByPool:
    """Return the free cards by GPU model and node pool. The cards of nodes without a model label are left out."""
    found: dict[tuple[str, str], FreeCards] = {}
    for name, cards in node_cards.items():
        model = nodes.model_of(name)
        if model and isinstance(cards, Cards):
            key = (model, nodes.labels[name].get(nodes.keys.pool, ""))
            fragmented = cards.fragmented_cores()
            free = FreeCards(len(cards.used_cores), cards.whole, cards.free_cores, fragmented, cards.most_cores)
            found[key] = found.get(key, FreeCards()) + free
    return found


class ExtenderMetrics:
    """Metrics of the scheduler's requests: their duration by kind, and the outcomes of placements and bindings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "vcuda_extender_seconds",
            "Time to answer a request of the scheduler.",
            ["verb"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self.placements = Counter(
            "vcuda_extender_placements",
            "Calls to place a vcuda pod, by outcome: placed, unplaceable (fits on no node), error (retried).",
            ["outcome"],
            registry=registry,
        )
        self.bindings = Counter(
            "vcuda_extender_bindings",
            "Bindings that the scheduler requested, by outcome: bound, error (retried).",
            ["outcome"],
            registry=registry,
        )


_GAUGES = (
    ("cards", "vcuda_cards", "Cards of the nodes."),
    ("whole", "vcuda_free_cards", "Cards of which no part is assigned to a pod."),
    ("free_cores", "vcuda_free_cores", "Free cores, in hundredths of a card."),
    (
        "fragmented_cores",
        "vcuda_fragmented_cores",
        "Free cores on partly used cards, which pods for whole cards cannot use.",
    ),
)
"""For each metric: the field of `FreeCards` that has its value, the metric's name, and its help text."""


class CardsCollector(Collector):
    """Collects metrics for Prometheus: the numbers of cards, free cards and free cores, by GPU model and node pool."""

    def __init__(self, free_cards: Callable[[], FreeCardsByPool]) -> None:
        self._free_cards = free_cards

    def collect(self) -> Iterable[Metric]:
        free = self._free_cards()
        for field, name, documentation in _GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=["model", "pool"])
            for key, cards in free.items():
                family.add_metric(key, getattr(cards, field))
            yield family
