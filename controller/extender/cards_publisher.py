"""Publishes how much of the cards is free: ConfigMap ``gpu-cards``, which the webhook chooses models by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from urllib.parse import quote

import msgspec
import structlog

from vcuda.errors import NotFound, VcudaError
from vcuda.free_cards import CONFIG_MAP, KEY, Figures, write_figures
from vcuda.kube import MERGE_PATCH, Kube

SPACING = 3.0
"""Seconds between two looks, and so between two writes at least."""


class CardsPublisher:
    """Writes the figures when they have changed. Nothing is decided by them but what is tried first."""

    def __init__(self, kube: Kube, namespace: str, figures: Callable[[], Figures]) -> None:
        self._kube = kube
        self._namespace = namespace
        self._figures = figures
        self._written: str | None = None
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
        """Write the figures, unless they are those that were written last; raises VcudaError where that fails."""
        text = write_figures(self._figures())
        if text == self._written:
            return
        collection = f"/api/v1/namespaces/{quote(self._namespace)}/configmaps"
        data = {KEY: text}
        try:
            self._kube.patch(f"{collection}/{CONFIG_MAP}", msgspec.json.encode({"data": data}), MERGE_PATCH)
        except NotFound:
            metadata = {"name": CONFIG_MAP, "labels": {"app.kubernetes.io/managed-by": "vcuda-quota"}}
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            self._kube.post(collection, msgspec.json.encode(made))
        self._written = text
