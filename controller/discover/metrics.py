"""The metrics about the GPU models of nodes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda.discovery.discovered import Doubt
from vcuda.discovery.sources import SOURCES
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Quota


@dataclass(eq=False)
class ModelNodesCollector(Collector):
    """Collects the number of nodes by the source of their GPU model, and of nodes whose model is in doubt.

    Also collects the cards of each model, and the nodes of each model that the quota limits. ``quota``: returns None
    before the quota has been read.
    """

    counts: Callable[[], tuple[Mapping[str, int], Mapping[Doubt, int]]]
    cards: Callable[[], Mapping[str, float | None]]
    nodes: Callable[[], Nodes]
    quota: Callable[[], Quota | None]

    def collect(self) -> Iterable[Metric]:
        by_source, by_doubt = self.counts()
        found, quota = self.nodes(), self.quota()
        nodes = GaugeMetricFamily(
            "vcuda_model_nodes", "Nodes with a GPU model, by the source of the model.", labels=["source"]
        )
        doubts = GaugeMetricFamily(
            "vcuda_model_doubts", "Nodes whose GPU model is in doubt, by kind of doubt.", labels=["doubt"]
        )
        for source in SOURCES:
            nodes.add_metric([source], by_source.get(source, 0))
        for doubt in Doubt:
            doubts.add_metric([doubt], by_doubt.get(doubt, 0))
        cards = GaugeMetricFamily(
            "vcuda_model_cards",
            "Cards of each GPU model on the nodes. A model is left out if the number of cards of a node is unknown.",
            labels=["model"],
        )
        limited = GaugeMetricFamily(
            "vcuda_quota_model_nodes", "Nodes of each GPU model that the quota limits.", labels=["model"]
        )
        for model, count in self.cards().items():
            if count is not None:
                cards.add_metric([model], count)
        for model in quota.models if quota else ():
            limited.add_metric([model], found.having(model).bit_count())
        return [nodes, doubts, cards, limited]
