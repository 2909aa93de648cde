"""What the controller tells Prometheus."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda.ledger.report import NamespaceUse
from vcuda.quota.model import CORES_PER_CARD


class SettleMetrics:
    """How the settling of ledgers fares: seconds a settlement, pending charges taken out, and what events missed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Gauge(
            "vcuda_settle_lag_seconds",
            "Since the namespace was due that has waited longest to be settled; 0 where none waits.",
            registry=registry,
        )
        self.seconds = Histogram("vcuda_settle_seconds", "Time to settle one namespace.", registry=registry)
        self.released = Counter(
            "vcuda_settle_pending_settled", "Pending charges counted as stored, or released.", registry=registry
        )
        self.drift = Counter(
            "vcuda_settle_mended",
            "Ledgers at rest that differed from the pods, found by the full pass.",
            registry=registry,
        )


class GarbageMetrics:
    """What was removed from pods and nodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.removed = Counter(
            "vcuda_gc_annotations",
            "Stale allocations removed from pods, and stale locks from nodes.",
            ["scheme", "rule"],
            registry=registry,
        )


class EvictionMetrics:
    """What became of the evictions of pods beyond their quota."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.evictions = Counter(
            "vcuda_audit_evictions",
            "Evictions of pods beyond their quota that were asked for, by what became of them.",
            ["outcome"],
            registry=registry,
        )


class ViolationsCollector(Collector):
    """What their quota would not let in, counted by the kind of object, namespace and finding."""

    def __init__(self, counts: Callable[[], Mapping[tuple[str, str, str], int]]) -> None:
        self._counts = counts

    # Collected when Prometheus asks: gauges that were set would go on telling of namespaces that have gone.
    def collect(self) -> Iterable[Metric]:
        """Yield a family for pods, and one for claims."""
        labels = ["namespace", "finding"]
        pods = GaugeMetricFamily("vcuda_audit_pods", "Pods that their quota would not let in.", labels=labels)
        claims = GaugeMetricFamily(
            "vcuda_audit_claims", "ResourceClaims that their quota would not let in.", labels=labels
        )
        for (kind, *values), count in self._counts().items():
            (pods if kind == "Pod" else claims).add_metric(values, count)
        return [pods, claims]


class UsageCollector(Collector):
    """Limits and usage by namespace and model, in hundredths of a card, as last reported.

    ``reservation_ages`` returns by namespace for how long a reservation there has not been renewed, in seconds, and may
    name namespaces that have none any more.
    """

    def __init__(
        self,
        reports: Callable[[], Mapping[str, NamespaceUse]],
        reservation_ages: Callable[[], Mapping[str, float]],
    ) -> None:
        self._reports = reports
        self._reservation_ages = reservation_ages

    def collect(self) -> Iterable[Metric]:
        """Yield one family per figure."""
        labels = ["namespace", "model"]
        limit = GaugeMetricFamily("vcuda_quota_limit_cores", "The limit, in hundredths of a card.", labels=labels)
        used = GaugeMetricFamily("vcuda_quota_used_cores", "In use, pending included, reserved not.", labels=labels)
        pending = GaugeMetricFamily("vcuda_quota_pending_cores", "Admitted, not yet seen stored.", labels=labels)
        terminating = GaugeMetricFamily(
            "vcuda_quota_terminating_cores", "Of pods that are gone and may still run.", labels=labels
        )
        reserved = GaugeMetricFamily(
            "vcuda_quota_reserved_cores", "Set aside by webhook replicas, to be granted or given back.", labels=labels
        )
        age = GaugeMetricFamily(
            "vcuda_quota_reservation_age_seconds",
            "Since the reservation that has been there longest was renewed; replicas renew or end theirs in seconds.",
            labels=["namespace"],
        )
        unpinned = GaugeMetricFamily(
            "vcuda_quota_unpinned_pods", "Pods that are held to no model.", labels=["namespace"]
        )
        taking_effect = GaugeMetricFamily(
            "vcuda_quota_taking_effect",
            "1 while the API server may not yet ask about the pods of a limited namespace.",
            labels=["namespace"],
        )
        ages = self._reservation_ages()
        lost = GaugeMetricFamily(
            "vcuda_quota_ledger_lost",
            "1 while nothing is admitted in a namespace, as its ledger was lost.",
            labels=["namespace"],
        )
        for namespace, use in self._reports().items():
            # A ledger that was deleted leaves its age behind.
            if namespace in ages and any(model.reserved for model in use.models):
                age.add_metric([namespace], ages[namespace])
            unpinned.add_metric([namespace], len(use.unpinned))
            taking_effect.add_metric([namespace], float(use.taking_effect))
            lost.add_metric([namespace], float(use.ledger_lost))
            for model in use.models:
                figures = (model.limit, model.used, model.pending, model.terminating, model.reserved)
                for family, cards in zip((limit, used, pending, terminating, reserved), figures, strict=True):
                    family.add_metric([namespace, model.model], round(cards * CORES_PER_CARD))
        return [limit, used, pending, terminating, reserved, age, unpinned, taking_effect, lost]
