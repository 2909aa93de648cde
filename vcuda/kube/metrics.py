"""Metrics that several programs export: the program's version, and the objects that its watches could not decode."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda import __version__
from vcuda.kube.reflector import Reflector

MAX_SHOWN = 10
"""The most objects of one watch in the metric, because tenants decide how many there are."""


def register_build(registry: CollectorRegistry) -> None:
    Gauge("vcuda_build_info", "1, with the version of this program.", ["version"], registry=registry).labels(
        __version__
    ).set(1)


def unread_objects(reflectors: Mapping[str, Reflector[Any]]) -> Metric:
    found = GaugeMetricFamily(
        "vcuda_watch_unread_object",
        f"1 for each object that this watch cannot decode. At most {MAX_SHOWN} objects of each watch are shown.",
        labels=["resource", "namespace", "name"],
    )
    for resource, reflector in reflectors.items():
        for key in itertools.islice(reflector.unread(), MAX_SHOWN):
            found.add_metric([resource, *key], 1)
    return found


@dataclass(frozen=True)
class UnreadCollector(Collector):
    """Exports the objects that the watches of ``reflectors`` could not decode."""

    reflectors: Callable[[], Mapping[str, Reflector[Any]]]

    def collect(self) -> Iterable[Metric]:
        return [unread_objects(self.reflectors())]
