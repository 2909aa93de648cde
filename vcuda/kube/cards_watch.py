"""The published figures of free cards, watched."""

from __future__ import annotations

import msgspec

from vcuda.free_cards import CONFIG_MAP, KEY, Figures, read_figures
from vcuda.kube.client import Kube
from vcuda.kube.paths import segment
from vcuda.kube.reflector import Reflector
from vcuda.objects import ConfigMap

_CONFIG_MAP = msgspec.json.Decoder(ConfigMap)


class CardsWatch:
    """Follows ConfigMap ``gpu-cards`` in the system's namespace. Where there is none nothing is known."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        path = f"/api/v1/namespaces/{segment(namespace)}/configmaps"
        params = {"fieldSelector": f"metadata.name={CONFIG_MAP}"}
        self._key = (namespace, CONFIG_MAP)
        self.reflector: Reflector[Figures] = Reflector(kube, path, _decode, params=params)

    def current(self) -> Figures:
        """Return the figures as last published."""
        return self.reflector.get(self._key) or {}


def _decode(raw: bytes) -> Figures:
    return read_figures((_CONFIG_MAP.decode(raw).data or {})[KEY])
