"""What the extender tells others: free cards to the webhook, its address to a Service, figures to Prometheus."""

import ipaddress
import time
from collections.abc import Callable, Iterable

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards
from vcuda.errors import NotFound, VcudaError
from vcuda.kube import MERGE_PATCH, Kube, objects, segment, upsert
from vcuda.placement.free_cards import CARDS_CONFIG_MAP, CARDS_KEY, FreeCards, FreeCardsByPool, write_free_cards
from vcuda.placement.nodes import Nodes

MIN_INTERVAL_SECONDS = 3.0
"""Between two writes at least."""

# A patch that changes nothing is not stored by the API server, and nobody who watches hears of it.
REPEAT_SECONDS = 60.0
"""After which the same figures are written again, should somebody have deleted or edited them."""


class CardsPublisher:
    """Writes the free cards when they have changed. ``clock`` is in seconds, and only runs forward."""

    # Nothing is decided by them but what is tried first, so it is no fault that they are some seconds old.

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
        """Write them, unless they were written a moment ago; raises VcudaError where that fails."""
        text, now = write_free_cards(self._free_cards()), self._clock()
        if text == self._written and now < self._repeat_at:
            return
        metadata = {"name": CARDS_CONFIG_MAP, "labels": _OURS}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CARDS_KEY: text}}
        upsert(self._kube, _collection(self._namespace), config_map)
        self._written, self._repeat_at = text, now + REPEAT_SECONDS


def delete_published(kube: Kube, namespace: str) -> None:
    """Delete the free cards that a leader before us has published; where that fails it is logged."""
    # Where no extender keeps them up they would mislead the webhook for ever.
    log = structlog.get_logger()
    try:
        kube.delete(f"{_collection(namespace)}/{CARDS_CONFIG_MAP}")
    except NotFound:
        return
    except VcudaError as error:
        log.warning("figures of free cards not deleted, though nobody keeps them up", error=str(error))
    else:
        log.info("figures of free cards deleted, as nobody keeps them up")


def _collection(namespace: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/configmaps"


def count_free(node_cards: NodeCards, nodes: Nodes) -> FreeCardsByPool:
    """Return the free cards by model and pool; a node without a model counts for nothing."""
    found: dict[tuple[str, str], FreeCards] = {}
    for name, cards in node_cards.items():
        model = nodes.model_of(name)
        if model and isinstance(cards, Cards):
            key = (model, nodes.labels[name].get(nodes.keys.pool, ""))
            fragmented = cards.fragmented_cores()
            free = FreeCards(len(cards.used_cores), cards.whole, cards.free_cores, fragmented, cards.most_cores)
            found[key] = found.get(key, FreeCards()) + free
    return found


SERVICE = "vcuda-extender"
CHECK_INTERVAL_SECONDS = 10.0
"""After which the slice is read again: what an earlier leader wrote late is put right."""

_OURS = {"app.kubernetes.io/managed-by": "vcuda-quota"}
_LABELS = {objects.SERVICE_NAME: SERVICE, objects.MANAGED_BY: "vcuda-quota", **_OURS}
_SLICE = msgspec.json.Decoder(objects.EndpointSlice)


class Advertiser:
    """Holds the one EndpointSlice of Service ``vcuda-extender`` to one IP address and port."""

    def __init__(self, kube: Kube, namespace: str, ip: str, port: int) -> None:
        self._kube = kube
        self._collection = f"/apis/discovery.k8s.io/v1/namespaces/{segment(namespace)}/endpointslices"
        self._path = f"{self._collection}/{SERVICE}"
        self._address_type = f"IPv{ipaddress.ip_address(ip).version}"
        self._endpoints = (objects.Endpoint((ip,), objects.Conditions(ready=True)),)
        self._ports = (objects.Port("https", port),)
        self._log = structlog.get_logger().bind(service=f"{namespace}/{SERVICE}", ip=ip, port=port)

    def hold(self) -> None:
        """Write the address, unless it stands there; raises VcudaError where that fails."""
        # The Service has no selector, so that only the leader is in its slice while the others are ready all the same.
        try:
            found = _SLICE.decode(self._kube.get(self._path))
            if self._leads_here(found):
                return
            self._correct(found)
        except NotFound:
            self._create()
        self._log.info("the Service leads here")

    def _leads_here(self, found: objects.EndpointSlice) -> bool:
        # Labels beside ours are other people's; without ours Kubernetes' own controllers would take the slice over.
        labels = (found.metadata.labels or {}).items()
        stands = (found.address_type, found.endpoints, found.ports)
        return stands == (self._address_type, self._endpoints, self._ports) and labels >= _LABELS.items()

    def _correct(self, found: objects.EndpointSlice) -> None:
        if found.address_type != self._address_type:  # immutable (ValidateEndpointSliceUpdate)
            self._kube.delete(self._path)
            self._create()
            return
        patch = {"metadata": {"labels": _LABELS}, "endpoints": self._endpoints, "ports": self._ports}
        self._kube.patch(self._path, msgspec.json.encode(patch), MERGE_PATCH)

    def _create(self) -> None:
        made = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": SERVICE, "labels": _LABELS},
            "addressType": self._address_type,
            "endpoints": self._endpoints,
            "ports": self._ports,
        }
        self._kube.post(self._collection, msgspec.json.encode(made))


class ExtenderMetrics:
    """How calls of the scheduler fare: seconds by verb, placements and bindings by outcome."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "vcuda_extender_seconds",
            "Time to answer the scheduler, by what it asked.",
            ["verb"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5),
            registry=registry,
        )
        self.placements = Counter(
            "vcuda_extender_placements",
            "vcuda pods by outcome: placed, unplaceable (on no node), error (to be tried again).",
            ["outcome"],
            registry=registry,
        )
        self.bindings = Counter(
            "vcuda_extender_bindings",
            "Bindings that the scheduler asked for, by outcome: bound, error (to be tried again).",
            ["outcome"],
            registry=registry,
        )


_GAUGES = (
    ("cards", "vcuda_cards", "Cards that nodes offer."),
    ("whole", "vcuda_free_cards", "Cards that nobody has anything of."),
    ("free_cores", "vcuda_free_cores", "Free cores, in hundredths of a card."),
    ("fragmented_cores", "vcuda_fragmented_cores", "Free cores that no pod for whole cards can use."),
)
"""Fields of `FreeCards`, and the metric of each."""


class CardsCollector(Collector):
    """The cards of the nodes by model and pool, as the extender counts them now."""

    def __init__(self, free_cards: Callable[[], FreeCardsByPool]) -> None:
        self._free_cards = free_cards

    def collect(self) -> Iterable[Metric]:
        """Yield one family per figure."""
        free = self._free_cards()
        for field, name, documentation in _GAUGES:
            family = GaugeMetricFamily(name, documentation, labels=["model", "pool"])
            for key, cards in free.items():
                family.add_metric(key, getattr(cards, field))
            yield family
