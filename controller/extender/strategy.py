"""Chooses the node of a pod, and the cards on that node.

The cards must be those that gpu-admission, tkestack's extender, would choose (``pkg/algorithm``). tkestack's device
plugin gpu-manager repeats that choice when the container starts. It rejects the container if the annotation of the pod
names another card. The containers of a pod get their cards one after the other. A container that requests whole cards
gets the unused cards with the lowest indexes. A container that requests a share (part of a card) gets the card with the
fewest free cores that has enough room. If several cards have equally few free cores, the least free memory decides, and
then the lowest index.

Nodes are tried in gpu-admission's order: fewest free cores, then least free memory, then name. In addition, `bin_pack`
prefers a node where the share fits on an already shared card. This keeps whole cards free for pods that need them.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from vcuda.allocations.cards import CardRequest, Cards, ContainerRequest, Share, Unplaceable
from vcuda.quota.model import CORES_PER_CARD


class Assignment(NamedTuple):
    """A pod's cards on a node, by the container's index. ``breaks``: the number of unused cards that become shared."""

    shares: Mapping[int, tuple[Share, ...]]
    breaks: int


class Placement(msgspec.Struct, frozen=True):
    """The node and the cards that were chosen for a pod."""

    node: str
    assignment: Assignment


NodeCards = Mapping[str, Cards | Unplaceable]
"""For each node, by name: its cards, or the reason why no pod can be placed on the node."""

UNSEEN = Unplaceable("the node is not known yet", final=False)


def bin_pack(request: CardRequest, names: Iterable[str], nodes: NodeCards) -> Placement | Mapping[str, Unplaceable]:
    """Return the placement by which the fewest unused cards become shared, or the reason why each node does not fit."""
    fitting, reasons = _offering(request, names, nodes)
    best: Placement | None = None
    for name, cards in fitting:
        assignment = assign(cards, request.containers)
        if isinstance(assignment, Unplaceable):
            reasons[name] = assignment
        elif not assignment.breaks:
            return Placement(name, assignment)
        elif best is None or assignment.breaks < best.assignment.breaks:
            best = Placement(name, assignment)
    return best or reasons


def assign(cards: Cards, containers: Iterable[ContainerRequest]) -> Assignment | Unplaceable:
    """Choose each container's cards from the ``cards`` of one node. If a container does not fit, return the reason."""
    shares: dict[int, tuple[Share, ...]] = {}
    breaks = 0
    for container in containers:
        if container.cards:
            found = _whole_cards(cards, container)
            shortage = _too_few(container.cards, cards.whole, len(cards.used_cores))
        else:
            found = _shared_card(cards, container)
            shortage = _no_fitting_card(container.cores, container.memory, cards.card_memory)
            breaks += any(cards.is_whole(share.card) for share in found)
        if not found:
            return shortage
        shares[container.container] = found
        cards = cards.taken(found)
    return Assignment(shares, breaks)


def _offering(
    request: CardRequest, names: Iterable[str], nodes: NodeCards
) -> tuple[list[tuple[str, Cards]], dict[str, Unplaceable]]:
    """Return the nodes with the requested kind of cards, fewest free cores first, and why the others do not fit."""
    offering: list[tuple[int, int, str, Cards]] = []
    reasons: dict[str, Unplaceable] = {}
    for name in dict.fromkeys(names):
        cards = nodes.get(name, UNSEEN)
        if isinstance(cards, Unplaceable):
            reasons[name] = cards
        elif cards.scheme is not request.scheme:
            reasons[name] = Unplaceable(f"no {request.scheme.cores} on the node")
        else:
            offering.append((cards.free_cores, cards.free_memory, name, cards))
    offering.sort()  # Every tuple has a different node name, so the sort never compares `Cards`.
    return [(name, cards) for _, _, name, cards in offering], reasons


def _shared_card(cards: Cards, container: ContainerRequest) -> tuple[Share, ...]:
    if container.cores > cards.most_cores:
        return ()
    best: tuple[int, int, int] | None = None
    for card in range(len(cards.used_cores)):
        cores, memory = cards.free_of(card)
        if cores >= container.cores and memory >= container.memory and (best is None or (cores, memory, card) < best):
            best = (cores, memory, card)
    return () if best is None else (Share(best[2], container.cores, container.memory),)


def _whole_cards(cards: Cards, container: ContainerRequest) -> tuple[Share, ...]:
    if container.cards > cards.whole:
        return ()
    whole = (card for card in range(len(cards.used_cores)) if cards.is_whole(card))
    return tuple(Share(card, CORES_PER_CARD, container.memory) for card in itertools.islice(whole, container.cards))


@functools.lru_cache(maxsize=1024)
def _too_few(needed: int, whole: int, cards: int) -> Unplaceable:
    return Unplaceable(f"{needed} whole vcuda cards needed, {whole} free", final=needed > cards)


@functools.lru_cache(maxsize=1024)
def _no_fitting_card(cores: int, memory: int, card_memory: int) -> Unplaceable:
    if memory > card_memory:
        return Unplaceable(f"{memory} MiB of one card needed, each has {card_memory} MiB")
    return Unplaceable(f"no card with {cores} cores and {memory} MiB free", final=False)
