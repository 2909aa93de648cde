"""Reads which vendor's device plugin serves a node, and which registers on the node are out of date.

A register is an annotation in which the device plugin of HAMi or vgpu-manager lists the node's cards.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from vcuda.k8s_types import Node, whole_or_none
from vcuda.placement.registers import ANNOTATIONS, Registers
from vcuda.requests.resources import PLAIN_CARDS, GpuResources
from vcuda.requests.schemes import Scheme

DISCOVERED = "quota.vcuda.io/discovered-model"
"""The annotation of a node that records the model label that the controller wrote, and the source of the model."""

_DELETED = "Deleted"
"""HAMi's scheduler begins a handshake annotation with this text if the device plugin does not answer (CheckHealth)."""
MAX_RECORD = 128
"""Maximum number of characters of the annotation `DISCOVERED` that are stored."""


class NodeFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts about a node's device plugins that are not in the node's labels or readable registers."""

    offered: Mapping[str, int] = MappingProxyType({})
    """The allocatable amounts of the resources by which a GPU can be requested."""
    answers: Mapping[str, bool] = MappingProxyType({})
    """By vendor's scheme: False if its scheduler has marked the node's device plugin as not answering."""
    malformed: tuple[str, ...] = ()
    """The keys of registers (annotations that list the node's cards) that cannot be read."""
    record: str = ""
    """The value of the annotation `DISCOVERED`."""


NO_FACTS = NodeFacts()


def read_facts(node: Node, known: GpuResources, registers: Registers) -> NodeFacts:
    """Return the facts about a node's device plugins. ``registers``: the node's readable registers, by scheme."""
    annotations, allocatable = node.annotations, (node.status and node.status.allocatable) or {}
    offered = {
        name: count
        for name, quantity in allocatable.items()
        if (known.counts(name) or name == PLAIN_CARDS) and (count := whole_or_none(quantity)) is not None
    }
    handshakes = {each.name: annotations.get(each.handshake or "") for each in known.schemes if each.handshake}
    facts = NodeFacts(
        offered,
        {name: not text.startswith(_DELETED) for name, text in handshakes.items() if text},
        tuple(key for key, scheme in ANNOTATIONS.items() if key in annotations and scheme not in registers),
        annotations.get(DISCOVERED, "")[:MAX_RECORD],
    )
    # In many clusters most nodes have no GPU, so the facts about these nodes are equal. One shared object saves memory.
    return facts if facts != NO_FACTS else NO_FACTS


def is_alive(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    """Return whether this vendor's device plugin serves the node now."""
    offered = facts.offered.get(scheme.main_resource)
    if scheme.register is None:
        return bool(offered)
    # NVIDIA's plugin may offer the same resource as HAMi's plugin. So only the register, the annotation in which HAMi
    # lists the node's cards, shows that HAMi's plugin serves the node.
    if scheme.name not in registers or _is_left_over(scheme, facts, registers):
        return False
    # After a device plugin has ended, kubelet still reports its resource on the node, with the amount 0.
    return facts.answers.get(scheme.name, False) if offered is None else offered > 0


def _is_left_over(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    # HAMi's scheduler may mark a plugin that still serves the node as not answering, and keep the mark
    # (Project-HAMi/HAMi#1839). HAMi's plugin offers several devices a card, and NVIDIA's plugin offers one.
    return not facts.answers.get(scheme.name, True) and _offers_cards(scheme, facts, registers)


def _offers_cards(scheme: Scheme, facts: NodeFacts, registers: Registers) -> bool:
    """Return whether the node offers its cards as NVIDIA's plugin does, and not as the register lists them."""
    register = registers.get(scheme.name, ())
    return facts.offered.get(scheme.main_resource) == len(register) != sum(card.count for card in register)


def outdated_registers(known: GpuResources, facts: NodeFacts, registers: Registers) -> frozenset[str]:
    """Return the vendors whose register (annotation) is still on the node, although another device plugin serves it."""
    return frozenset(each.name for each in known.schemes if _is_left_over(each, facts, registers))


def contradictions(known: GpuResources, facts: NodeFacts, registers: Registers) -> Iterator[str]:
    """Yield a message for each vendor whose register does not fit the resources that the node offers.

    The node still counts as a node of the vendor.
    """
    for scheme in known.schemes:
        if scheme.name not in facts.answers or not registers.get(scheme.name):
            continue
        name, resource = scheme.display_name, scheme.main_resource
        offered, cards = facts.offered.get(resource, 0), len(registers[scheme.name])
        remove = f"If {name} does not run on the node, remove annotation {scheme.register}"
        if not facts.answers[scheme.name] and offered and not _is_left_over(scheme, facts, registers):
            state = f"annotation {scheme.handshake} says that the device plugin of {name} does not answer"
            yield f"{state}, but the node offers {offered} {resource}. {remove}, otherwise {scheme.handshake}"
        elif facts.answers[scheme.name] and offered and _offers_cards(scheme, facts, registers):
            parts = sum(card.count for card in registers[scheme.name])
            listed = f"the register of {name} lists {cards} cards of {parts} {resource}"
            yield f"{listed}, but the node offers {offered}. {remove}"
