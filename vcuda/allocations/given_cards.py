"""Finds pods that use a card of another GPU model than the model that is charged for the pod.

The annotations of a pod list its cards by uuid. A node's register, an annotation that lists the node's cards, has each
card's type. A pod with a wrong card is only reported and keeps its charge, because both annotations may be wrong.
"""

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.placement.nodes import Nodes


class OtherCard(msgspec.Struct, frozen=True):
    """A card of another GPU model than its pod's charged model. ``models``: the GPU models of the card's type."""

    charged: str
    node: str
    uuid: str
    type: str
    models: tuple[str, ...]

    def __str__(self) -> str:
        known = f", of model {' or '.join(self.models)}" if self.models else ""
        card = f"card {self.uuid} of node {self.node}, a {self.type}{known}"
        return f"the pod or claim is charged to {self.charged}, but was given {card}"


def find_other_card(pod: StoredPod, nodes: Nodes) -> OtherCard | None:
    """Return the first card of a bound pod whose GPU model is not the pod's charged model; None if there is none."""
    charged = pod.model_on(nodes)
    registers = nodes.registers.get(pod.node, {})
    if charged is None or pod.allocation is None or not registers:
        return None
    for scheme in pod.allocation.schemes:
        register = registers.get(scheme.name, ())
        for uuid in (pod.allocation.get(scheme.allocated) or "").split(","):
            kind = next((card.type for card in register if card.uuid == uuid), None)
            if kind and kind not in nodes.types.on(scheme.name, charged).own:
                return OtherCard(charged, pod.node, uuid, kind, nodes.types.models_of(scheme.name, kind))
    return None
