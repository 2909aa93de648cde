"""The metrics of the webhook. Each process has its own registry."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda.admission_review import AdmissionResponse
from vcuda.errors import DropReason
from vcuda.kube import Reflector
from vcuda.kube.metrics import register_build, unread_objects

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REJECTIONS = 5000
MAX_NAMESPACE_LENGTH = 63
OTHERS = "*"
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of the webhook's answers, and gauges and counters that other modules add with `watch` and `count`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._admissions = Counter(
            "vcuda_admissions",
            "Admission reviews answered, by path, outcome and the schemes by which the pod requests GPUs.",
            ["path", "outcome", "scheme"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "vcuda_admission_duration_seconds",
            "Seconds from reading the whole request to computing its answer.",
            ["path"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._dropped = Counter(
            "vcuda_reviews_dropped",
            "Admission reviews that this replica did not decide, by path and reason; no quota was charged for them.",
            ["path", "reason"],
            registry=self.registry,
        )
        self.rejections = Rejections()
        self.registry.register(self.rejections)
        register_build(self.registry)
        self._admission_of: dict[tuple[str, str, str], Counter] = {}
        self._seconds_of: dict[str, Histogram] = {}

    def observe(self, path: str, answer: AdmissionResponse, seconds: float, namespace: str) -> None:
        # The counter of each set of labels is cached, because looking up a counter in prometheus_client takes longer
        # than incrementing it.
        key = (path, answer.outcome, answer.scheme)
        counter = self._admission_of.get(key) or self._admission_of.setdefault(key, self._admissions.labels(*key))
        histogram = self._seconds_of.get(path) or self._seconds_of.setdefault(path, self._seconds.labels(path))
        counter.inc()
        histogram.observe(seconds)
        if not answer.allowed and path != "/quota":
            self.rejections.add(namespace, answer.outcome)

    def drop(self, path: str, reason: DropReason) -> None:
        self._dropped.labels(path, reason.value).inc()

    def watch(self, name: str, help_: str, read: Callable[[], float]) -> None:
        """Export a gauge whose value ``read`` returns at each scrape."""
        Gauge(name, help_, registry=self.registry).set_function(read)

    def count(self, name: str, help_: str, read: Callable[[], float]) -> None:
        """Export a counter whose value ``read`` returns at each scrape. Prometheus adds ``_total`` to ``name``."""
        self.registry.register(_Count(name, help_, read))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Rejections(Collector):
    """Counts the rejected creates by namespace and reason.

    A tenant may choose the names of namespaces. So at most `MAX_REJECTIONS` pairs have a count of their own.
    ``named``: True if namespaces may be named, because clients without a certificate cannot read the metrics.
    """

    def __init__(self) -> None:
        self.named = False
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def add(self, namespace: str, reason: str) -> None:
        with self._lock:
            key = (namespace if self.named and len(namespace) <= MAX_NAMESPACE_LENGTH else OTHERS, reason)
            if key not in self._counts and len(self._counts) >= MAX_REJECTIONS:
                key = (OTHERS, reason)
            self._counts[key] = self._counts.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        found = CounterMetricFamily(
            "vcuda_rejections",
            f"Rejected creates of pods and claims, by namespace and reason. Namespaces are counted as {OTHERS} without"
            f" --protect-metrics, and after {MAX_REJECTIONS} pairs of namespace and reason.",
            labels=["namespace", "reason"],
        )
        with self._lock:
            counts = [*self._counts.items()]
        for labels, count in counts:
            found.add_metric(labels, count)
        return [found]


class LedgerMetrics:
    """The metrics of charges, and of the writes of ledgers. A ledger records the charges of one namespace."""

    def __init__(self, registry: CollectorRegistry) -> None:
        histogram = functools.partial(Histogram, registry=registry)
        counter = functools.partial(Counter, registry=registry)
        self.batch = histogram(
            "vcuda_ledger_batch_charges", "Charges decided in one batch.", buckets=(1, 2, 4, 8, 16, 32, 64)
        )
        self.wait = histogram(
            "vcuda_ledger_wait_seconds",
            "Seconds from the arrival of a charge until its decision is written.",
            buckets=_BUCKETS,
        )
        self.size = histogram(
            "vcuda_ledger_bytes",
            "Size in bytes of each ledger that is written.",
            buckets=(1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
        )
        self.spent = counter(
            "vcuda_ledger_spent",
            "Charges admitted from a reservation and written later, several at once.",
        )
        self.conflicts = counter(
            "vcuda_ledger_conflicts", "Ledger writes that failed because another replica or the controller wrote first."
        )
        self.lists = counter("vcuda_ledger_lists", "LISTs of a namespace's pods and claims before a rejection.")
        self.unsure = counter(
            "vcuda_ledger_unsure",
            "Ledger writes without an answer. The replica reads the ledger again to find out if they succeeded.",
        )


@dataclasses.dataclass(frozen=True)
class _Count(Collector):
    name: str
    help: str
    read: Callable[[], float]

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self.name, self.help, value=self.read())]


@dataclasses.dataclass(frozen=True)
class ReflectorCollector(Collector):
    """Exports the seconds since the last event, and the number of incidents by kind, for each watch on Kubernetes."""

    reflectors: Callable[[], Mapping[str, Reflector[Any]]]
    clock: Callable[[], float] = time.monotonic

    def collect(self) -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "vcuda_watch_last_event_age_seconds",
            "Seconds since the last list, start, event or bookmark of this watch. Above 120, the watch has stalled.",
            labels=["resource"],
        )
        trouble = CounterMetricFamily(
            "vcuda_watch_incidents",
            "Incidents of this watch since the process started, by kind.",
            labels=["resource", "kind"],
        )
        for resource, reflector in self.reflectors().items():
            age.add_metric([resource], reflector.last_event_age(self.clock()))
            for kind, count in dataclasses.asdict(reflector.counts).items():
                trouble.add_metric([resource, kind], count)
        return [age, trouble, unread_objects(self.reflectors())]
