"""Finds the nodes of a GPU model that can serve a pod, and the scheduler that places the pod there.

HAMi and vgpu-manager list the cards of each of their nodes in a node annotation, the register. Their schedulers skip
nodes without a register (HAMi ``pkg/scheduler/scheduler.go``, ``getNodesUsage``: "node unregistered"). On these nodes,
``nvidia.com/gpu`` is a whole card of NVIDIA's device plugin, and the scheduler that the pod names can assign it.
"""

from collections.abc import Iterable

import msgspec

from vcuda.k8s_types import Pod
from vcuda.placement.affinity import NodeSelection, required_terms
from vcuda.placement.nodes import Nodes
from vcuda.requests.pod_request import PodRequest

HOSTNAME = "kubernetes.io/hostname"
"""The node label by which the node affinity of a pod excludes nodes."""

MAX_AVOIDED = 256
"""Maximum number of nodes that the node affinity of a pod excludes. The affinity lists the names of these nodes."""

MAX_AVOIDED_LENGTH = 2**18
"""Maximum total length of the names of excluded nodes. Each term of the node affinity repeats all names."""

DEFAULT_SCHEDULER = "default-scheduler"


class ServedBy(msgspec.Struct, frozen=True, gc=False):
    """The nodes of one model that can serve a pod, and the scheduler that places the pod on them."""

    nodes: int
    """The nodes that can serve the pod, as a bit set (see `Nodes.index`); empty if no existing node can."""
    scheduler: str | None = None
    """The scheduler that places the pod; None if the pod keeps the scheduler that it names."""
    avoided: tuple[str, ...] = ()
    """The hostnames of the nodes to exclude, because the scheduler that the pod names cannot assign their cards."""


def serve(pod: Pod, request: PodRequest, every: int, nodes: Nodes, placing: str | None = None) -> ServedBy:
    """Return the nodes of a model that can serve a pod, and the scheduler that places the pod there. ``every``: all
    nodes of the model. ``placing``: the scheduler for the vendors' resources that the pod requests."""
    if not request.schemes:
        return ServedBy(every)
    for scheme in request.registered:
        # If no node has a register (list of cards) of the scheme, its nodes are unknown. So no node is left out.
        every &= nodes.registered.get(scheme.name, every)
    if request.registered or not all(each.register for each in request.schemes):
        return ServedBy(every, placing)
    return _serve_whole_cards(pod, request, nodes, placing, every)


def _serve_whole_cards(pod: Pod, request: PodRequest, nodes: Nodes, placing: str | None, every: int) -> ServedBy:
    # Nodes with a vendor's register and nodes without a register can both serve a request for whole
    # cards. But they need different schedulers, so the pod is limited to one of these two kinds of nodes.
    with_register = 0
    for scheme in request.schemes:
        with_register |= every & nodes.registered.get(scheme.name, 0)
    own = pod.spec.scheduler_name not in ("", DEFAULT_SCHEDULER, placing)
    keeps = own or any(each.opt_out and each.opt_out in pod.labels.items() for each in request.schemes)
    if not with_register:
        return ServedBy(every, None if every or keeps else placing)
    plain = every & ~with_register
    if keeps and plain and with_register.bit_count() <= MAX_AVOIDED:
        avoided = nodes.index.values_on(with_register, HOSTNAME)
        repeated = max(len(required_terms(pod.spec) or ()), 1)
        if None not in avoided and repeated * sum(map(len, map(str, avoided))) <= MAX_AVOIDED_LENGTH:
            return ServedBy(plain, None, tuple(sorted(map(str, avoided))))
    # The nodes with a register serve only pods of their own scheduler, and a pod cannot have two schedulers.
    return ServedBy(0 if own and placing else with_register, placing)


def reaches(pod: Pod, nodes: Nodes, key: str, values: Iterable[str]) -> bool:
    """Return whether a pod may run on an existing node whose label ``key`` has one of ``values``."""
    selection = NodeSelection.of(pod.spec)
    among = nodes.index.selected(selection.selector) & nodes.index.having(key, values)
    return any(nodes.index.matching(term, among) for term in selection.terms)


def unserved(model: str, request: PodRequest, nodes: Nodes, placing: str | None) -> str:
    """Return the message that no existing node of a model can serve the pod: a register is missing, or the pod names
    another scheduler than that of the nodes, ``placing``."""
    if not request.registered:
        other = placing or "another scheduler"
        return f"{model} is excluded, because only {other} places pods on its nodes that the pod may use"
    names = " and ".join(each.display_name for each in request.registered if each.name in nodes.registered)
    return f"{model} is excluded, because no node that the pod may use has a register of {names}"
