"""Reads from a node what decides the placement of pods, and builds the nodes of a cluster from it."""

from collections.abc import Mapping

import msgspec

from vcuda.k8s_types import Node
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.device_plugins import NO_FACTS, NodeFacts, outdated_registers, read_facts
from vcuda.placement.nodes import NodeAvailability, Nodes, read_state
from vcuda.placement.registers import Registers
from vcuda.requests.resources import CardModels, GpuResources


class ObservedNode(Node, frozen=True):
    """A node, with what its registers, device plugins, taints and resources say about the placement of pods."""

    registers: Registers = msgspec.field(default_factory=dict)
    facts: NodeFacts = NO_FACTS
    outdated: frozenset[str] = frozenset()
    """The names of the schemes (vendors' ways to share GPUs) whose list of the node's cards is out of date."""
    state: NodeAvailability = NodeAvailability()


def observe(node: Node, known: GpuResources, registers: Registers) -> ObservedNode:
    """Return a node with the facts about its device plugins. ``registers``: the node's readable registers."""
    facts = read_facts(node, known, registers)
    outdated = outdated_registers(known, facts, registers)
    return ObservedNode(node.metadata, node.status, None, registers, facts, outdated, read_state(node))


def nodes_of(seen: Mapping[str, ObservedNode], keys: NodeLabels, named: CardModels) -> Nodes:
    """Return the nodes of a cluster. ``seen``: by name of the node. ``named``: the entries of ``gpu_models``."""
    labels = {name: node.labels for name, node in seen.items()}
    registers = {name: node.registers for name, node in seen.items() if node.registers}
    return Nodes.of(
        labels, keys, registers, named, {name: node.outdated for name, node in seen.items() if node.outdated}
    )
