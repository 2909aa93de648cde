"""Publishes how much of the cards is free: ConfigMap ``gpu-cards``, which the webhook chooses models by."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog

from controller.extender.strategy import NodeCards
from vcuda.allocations.cards import Cards
from vcuda.errors import NotFound, VcudaError
from vcuda.kube import MERGE_PATCH, Kube, segment
from vcuda.placement.placement import CARDS_CONFIG_MAP, CARDS_KEY, FreeCards, FreeCardsByPool, Nodes, write_free_cards

SPACING = 3.0
"""Seconds between two looks, and so between two writes at least."""

REPEAT = 60.0
"""Seconds after which the same figures are written again, should somebody have deleted or edited them.

A patch that changes nothing is not stored by the API server, and nobody who watches hears of it.
"""


class CardsPublisher:
    """Writes the figures when they have changed. Nothing is decided by them but what is tried first.

    ``clock`` is in seconds, and only runs forward.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        figures: Callable[[], FreeCardsByPool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._figures = figures
        self._clock = clock
        self._written: str | None = None
        self._repeat_at = 0.0
        self._log = structlog.get_logger()

    def run(self, stopping: threading.Event) -> None:
        """Look, and write, until told to stop."""
        while not stopping.is_set():
            try:
                self.publish()
            except VcudaError as error:
                self._log.warning("free cards not published", error=str(error))
            stopping.wait(SPACING)

    def publish(self) -> None:
        """Write the figures, unless they were written a moment ago; raises VcudaError where that fails."""
        text, now = write_free_cards(self._figures()), self._clock()
        if text == self._written and now < self._repeat_at:
            return
        collection = _collection(self._namespace)
        data = {CARDS_KEY: text}
        try:
            self._kube.patch(f"{collection}/{CARDS_CONFIG_MAP}", msgspec.json.encode({"data": data}), MERGE_PATCH)
        except NotFound:
            metadata = {"name": CARDS_CONFIG_MAP, "labels": {"app.kubernetes.io/managed-by": "vcuda-quota"}}
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            self._kube.post(collection, msgspec.json.encode(made))
        self._written, self._repeat_at = text, now + REPEAT


def withdraw(kube: Kube, namespace: str) -> None:
    """Delete the figures that a leader before us has published: where no extender keeps them up they mislead for ever.

    Where that fails it is logged, and the next call tries again.
    """
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


def figures_of(known: NodeCards, nodes: Nodes) -> FreeCardsByPool:
    """Return the figures by model and pool; a node without a model counts for nothing."""
    found: dict[tuple[str, str], FreeCards] = {}
    for name, cards in known.items():
        model = nodes.model_of(name)
        if model and isinstance(cards, Cards):
            key = (model, nodes.labels[name].get(nodes.keys.pool, ""))
            found[key] = found.get(key, FreeCards()) + _count(cards)
    return found


def _count(cards: Cards) -> FreeCards:
    return FreeCards(len(cards.used_cores), cards.whole, cards.free_cores, cards.fragmented_cores(), cards.most_cores)
