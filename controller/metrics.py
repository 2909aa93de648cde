"""The metrics of the controller."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda.kube.metrics import register_build
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.quota.values import MIB


def register_leading(registry: CollectorRegistry, is_leading: Callable[[], bool]) -> None:
    """Register the metrics that a standby has too."""
    gauge = Gauge("vcuda_controller_leading", "1 if this replica holds the Lease and leads, else 0.", registry=registry)
    gauge.set_function(lambda: float(is_leading()))
    register_build(registry)


class RecountMetrics:
    """Metrics about recounting the ledgers of namespaces from the stored objects."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Gauge(
            "vcuda_recount_lag_seconds",
            "Seconds since the namespace that has waited longest was due to be recounted; 0 if no namespace waits.",
            registry=registry,
        )
        self.seconds = Histogram("vcuda_recount_seconds", "Time to recount one namespace.", registry=registry)
        self.released = Counter(
            "vcuda_recount_pending_ended", "Pending charges that became committed or were released.", registry=registry
        )
        self.drift = Counter(
            "vcuda_recount_drifts",
            "Ledgers that a resync found to differ from the stored objects although no recounting was due.",
            registry=registry,
        )


class GarbageMetrics:
    """Metrics about the removal of stale GPU allocations, which are annotations and labels of pods and nodes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.removed = Counter(
            "vcuda_gc_annotations",
            "Stale allocations removed from pods, and stale locks removed from nodes.",
            ["scheme", "rule"],
            registry=registry,
        )


class EvictionMetrics:
    """Metrics about evictions of pods that the quota of their namespace would not admit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.evictions = Counter(
            "vcuda_violations_evictions",
            "Evictions requested for pods beyond their quota, by outcome.",
            ["outcome"],
            registry=registry,
        )


@dataclass(eq=False)
class ViolationsCollector(Collector):
    """Collects how many pods and claims their quota would not admit. ``counts``: by kind, namespace and finding."""

    counts: Callable[[], Mapping[tuple[str, str, str], int]]

    # The numbers are computed at each scrape, so that the numbers of deleted namespaces disappear.
    def collect(self) -> Iterable[Metric]:
        labels = ["namespace", "finding"]
        pods = GaugeMetricFamily("vcuda_violations_pods", "Pods that their quota would not admit.", labels=labels)
        claims = GaugeMetricFamily(
            "vcuda_violations_claims", "ResourceClaims that their quota would not admit.", labels=labels
        )
        for (kind, *values), count in self.counts().items():
            (pods if kind == "Pod" else claims).add_metric(values, count)
        return [pods, claims]


@dataclass(eq=False)
class UsageCollector(Collector):
    """Collects the limits and the usage by namespace and GPU model from the usage reports.

    ``reports``: returns the last usage report of each namespace.
    ``reservation_ages``: returns for each namespace the seconds since its oldest reservation was renewed. A reservation
    is quota that a webhook replica may use without a write. The result may include namespaces without any.
    """

    reports: Callable[[], Mapping[str, NamespaceUse]]
    reservation_ages: Callable[[], Mapping[str, float]]

    def collect(self) -> Iterable[Metric]:
        by_model = {name: GaugeMetricFamily(name, text, labels=["namespace", "model"]) for name, text in _BY_MODEL}
        by_namespace = {name: GaugeMetricFamily(name, text, labels=["namespace"]) for name, text in _BY_NAMESPACE}
        ages = self.reservation_ages()
        uses = self.reports()
        for namespace, use in uses.items():
            by_namespace["vcuda_quota_unpinned_pods"].add_metric([namespace], len(use.unpinned))
            by_namespace["vcuda_quota_taking_effect"].add_metric([namespace], use.taking_effect)
            by_namespace["vcuda_quota_ledger_lost"].add_metric([namespace], use.ledger_lost)
            # A reservation may have ended since `ages` was read. So its age counts only if the report still has it.
            if namespace in ages and any(model.reserved for model in use.models):
                by_namespace["vcuda_quota_reservation_age_seconds"].add_metric([namespace], ages[namespace])
            if use.total:
                by_namespace["vcuda_quota_total_limit_cards"].add_metric([namespace], use.total.limit or 0)
                by_namespace["vcuda_quota_total_used_cards"].add_metric([namespace], use.total.used)
            for model in use.models:
                for name, figure in _model_figures(model).items():
                    if figure is not None:
                        by_model[name].add_metric([namespace, model.model], figure)
        return [*by_model.values(), *by_namespace.values(), *_of_teams(uses.values())]


def _of_teams(uses: Iterable[NamespaceUse]) -> Iterable[Metric]:
    by_team = {name: GaugeMetricFamily(name, text, labels=["team", "model"]) for name, text in _BY_TEAM}
    for team in {use.team.name: use.team for use in uses if use.team}.values():
        for each in team.limits:
            figures = _model_figures(each)
            for name, family in by_team.items():
                if (figure := figures[name.replace("_team_", "_")]) is not None:
                    family.add_metric([team.name, each.model], figure)
    return by_team.values()


_BY_MODEL = (
    ("vcuda_quota_limit_cards", "The limit in cards."),
    ("vcuda_quota_limit_memory_bytes", "The memory limit, if the memory of the model is limited."),
    (
        "vcuda_quota_used_memory_bytes",
        "Used memory, if it is limited. It includes pending memory, but not reserved memory.",
    ),
    ("vcuda_quota_used_cards", "Used cards. They include pending cards, but not reserved cards."),
    ("vcuda_quota_pending_cards", "Cards of admitted pods that the controller has not seen stored yet."),
    ("vcuda_quota_terminating_cards", "Cards of deleted pods whose containers may still run."),
    ("vcuda_quota_reserved_cards", "Cards that webhook replicas have reserved to admit pods."),
)
_BY_TEAM = (
    ("vcuda_quota_team_limit_cards", "The limit of a team in cards. The model `total` is the limit of all models."),
    ("vcuda_quota_team_used_cards", "Cards that the namespaces of a team use together."),
    ("vcuda_quota_team_limit_memory_bytes", "The memory limit of a team, if the memory of the model is limited."),
    ("vcuda_quota_team_used_memory_bytes", "Memory that the namespaces of a team use together, if it is limited."),
)
_BY_NAMESPACE = (
    (
        "vcuda_quota_reservation_age_seconds",
        "Seconds since the oldest reservation was renewed. Every reservation is renewed or released within seconds.",
    ),
    ("vcuda_quota_total_limit_cards", "The limit of all models together in cards, if the quota entry has `total`."),
    ("vcuda_quota_total_used_cards", "Used cards of all models together, if the quota entry has `total`."),
    ("vcuda_quota_unpinned_pods", "Pods without a known GPU model."),
    (
        "vcuda_quota_taking_effect",
        "1 while the API server possibly does not call the webhook yet for the pods of a limited namespace.",
    ),
    ("vcuda_quota_ledger_lost", "1 while no GPU pod is admitted in a namespace because its ledger was lost."),
)


def _model_figures(model: ModelUse) -> Mapping[str, float | None]:
    limited = model.memory_limit is not None
    return {
        "vcuda_quota_limit_cards": model.limit,
        "vcuda_quota_used_cards": model.used,
        "vcuda_quota_pending_cards": model.pending,
        "vcuda_quota_terminating_cards": model.terminating,
        "vcuda_quota_reserved_cards": model.reserved,
        "vcuda_quota_limit_memory_bytes": (model.memory_limit or 0) * MIB if limited else None,
        "vcuda_quota_used_memory_bytes": (model.memory_used or 0) * MIB if limited else None,
    }
