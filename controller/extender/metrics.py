"""The metrics of the scheduler extender."""

from prometheus_client import CollectorRegistry, Counter, Histogram


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
