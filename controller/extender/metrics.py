"""What the extender tells Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda.placement.placement import FreeCardsByPool


class ExtenderMetrics:
    """How calls of the scheduler fare."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "vcuda_extender_seconds",
            "Time to answer the scheduler, by what it asked.",
            ["verb"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self._placements = Counter(
            "vcuda_extender_placements",
            "vcuda pods by outcome: placed, unplaceable (on no node), error (to be tried again).",
            ["outcome"],
            registry=registry,
        )

        self._bindings = Counter(
            "vcuda_extender_bindings",
            "Bindings that the scheduler asked for, by outcome: bound, error (to be tried again).",
            ["outcome"],
            registry=registry,
        )

    def count(self, outcome: str) -> None:
        """Count one pod."""
        self._placements.labels(outcome).inc()

    def count_binding(self, outcome: str) -> None:
        """Count one binding."""
        self._bindings.labels(outcome).inc()

    def observe(self, verb: str, seconds: float) -> None:
        """Count one call."""
        self._seconds.labels(verb).observe(seconds)


class CardsCollector(Collector):
    """The cards of the nodes by model and pool, as the extender counts them now."""

    def __init__(self, figures: Callable[[], FreeCardsByPool]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """Yield one family per figure."""
        labels = ["model", "pool"]
        cards = GaugeMetricFamily("vcuda_cards", "Cards that nodes offer.", labels=labels)
        whole = GaugeMetricFamily("vcuda_free_cards", "Cards that nobody has anything of.", labels=labels)
        cores = GaugeMetricFamily("vcuda_free_cores", "Free cores, in hundredths of a card.", labels=labels)
        fragmented = GaugeMetricFamily(
            "vcuda_fragmented_cores", "Free cores that no pod for whole cards can use.", labels=labels
        )
        for key, free in self._figures().items():
            cards.add_metric(key, free.cards)
            whole.add_metric(key, free.whole)
            cores.add_metric(key, free.free_cores)
            fragmented.add_metric(key, free.fragmented_cores)
        return [cards, whole, cores, fragmented]
