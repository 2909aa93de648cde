"""Finds pods that use a card of another GPU model than the model that they are charged for.

The annotations of a pod name its cards. The register of a node, an annotation that lists the node's cards, has the type
of each card. Such a pod is only reported. Its charge stays the same, because both annotations may be wrong.
"""

import re

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.placement.nodes import Nodes

# `_SEPARATORS` splits the annotation with a pod's cards. HAMi writes "uuid,vendor,memory,cores:" for each card,
# "[slice]" after a uuid in MIG mode, and ";" after each container. vgpu-manager writes
# "container[index_uuid_cores_memory]".
_SEPARATORS = re.compile(r"[][,:;_\s]+")


class OtherCard(msgspec.Struct, frozen=True):
    """A card of another model than its pod is charged for. ``models``: the models to which the card's type belongs."""

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
    """Return the first card of a bound pod that is of another model than the pod is charged for; otherwise None."""
    charged = pod.model_on(nodes)
    registers = nodes.registers.get(pod.node, {})
    if charged is None or pod.allocation is None or not registers:
        return None
    for scheme in pod.allocation.schemes:
        register = registers.get(scheme.name)
        for uuid in _SEPARATORS.split(pod.allocation.get(scheme.allocated) or ""):
            kind = register.type_of(uuid) if register else None
            if kind and kind not in nodes.types.of_model(scheme.name, charged):
                return OtherCard(charged, pod.node, uuid, kind, nodes.types.models_of(scheme.name, kind))
    return None
