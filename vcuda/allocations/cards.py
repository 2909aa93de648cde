"""The cards of a node, and what is taken of them: what gpu-admission works out from a node and the pods on it.

A node offers cards by ``vcuda-core`` in its capacity, 100 a card. ``vcuda-memory`` is divided evenly between the cards
in whole blocks, and the rest of it is nobody's. Which cards a container has stands in its pod's annotations
(tkestack/gpu-admission ``pkg/device``, ``pkg/util``; gpu-manager goes by the same).
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Container, Pod, Quantity, can_be_name, parse_whole
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.pod_request import resources_of
from vcuda.requests.schemes import SCHEMES, Scheme

INDEXED = tuple(scheme for scheme in SCHEMES if scheme.card_index)
"""The schemes whose scheduler chooses the cards of a container by number."""

MOST_CARDS = 1024
"""Cards a node may claim to have; more is a mistake, and would cost memory."""


class Share(NamedTuple):
    """What one container has of one card: cores, and memory in MiB. With 100 cores it has all of its memory too."""

    card: int
    cores: int
    memory: int


class Unplaceable(NamedTuple):
    """Why a pod cannot be placed on a node. ``final``: whatever ends on the node, it stays so."""

    text: str
    final: bool = True


class Cards(msgspec.Struct, frozen=True, gc=False):
    """A node's cards by number: cores and MiB used of each. More may be used than there is: then nothing is free.

    ``card_memory`` is one card's memory in MiB. ``free_cores`` are those of all cards; ``free_memory`` is what the node
    has left in MiB, with what could not be divided between the cards. ``whole`` cards are those that nobody has
    anything of; ``most_cores`` are the free cores of the card that has the most. All this is kept, as each pod asks
    every node.
    """

    scheme: Scheme
    card_memory: int
    used_cores: tuple[int, ...]
    used_memory: tuple[int, ...]
    free_cores: int
    free_memory: int
    whole: int
    most_cores: int

    @classmethod
    def unused(cls, scheme: Scheme, count: int, memory: int) -> "Cards":
        """Return so many cards of a node with ``memory`` blocks of the scheme's unit, none of them used."""
        unit = scheme.memory_unit
        nothing = (0,) * count
        free = count * CORES_PER_CARD
        return cls(scheme, memory // count * unit, nothing, nothing, free, memory * unit, count, CORES_PER_CARD)

    def free_of(self, card: int) -> tuple[int, int]:
        """Return the free cores and the free memory in MiB of one card."""
        return max(CORES_PER_CARD - self.used_cores[card], 0), max(self.card_memory - self.used_memory[card], 0)

    def is_whole(self, card: int) -> bool:
        """Return whether nobody has anything of the card."""
        return not self.used_cores[card] and not self.used_memory[card]

    def have(self, shares: Iterable[Share]) -> bool:
        """Return whether all these shares are free, one beside the other."""
        cards = self
        for share in shares:
            if not 0 <= share.card < len(cards.used_cores):
                return False
            cores, memory = cards.free_of(share.card)
            whole = share.cores >= CORES_PER_CARD
            if not (cards.is_whole(share.card) if whole else cores >= share.cores and memory >= share.memory):
                return False
            cards = cards.taken((share,))
        return True

    def fragmented_cores(self) -> int:
        """Return the free cores of cards that are not wholly free: no pod that wants whole cards can have them."""
        return self.free_cores - self.whole * CORES_PER_CARD

    def taken(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards with these shares used too. One of a card that the node does not have counts for nothing."""
        return self._changed(shares, 1)

    def returned(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards without these shares, which must have been taken before."""
        return self._changed(shares, -1)

    def _changed(self, shares: Iterable[Share], sign: int) -> "Cards":
        cores, memory = list(self.used_cores), list(self.used_memory)
        free_cores, free_memory = self.free_cores, self.free_memory
        for share in shares:
            if not 0 <= share.card < len(cores):  # an annotation may name a card that has since been taken out
                continue
            card = share.card
            # More may be used of a card than there is, so what it adds to the sums is taken out and worked out anew.
            free_cores += min(cores[card], CORES_PER_CARD)
            free_memory += min(memory[card], self.card_memory)
            cores[card] += sign * min(share.cores, CORES_PER_CARD)
            memory[card] += sign * (self.card_memory if share.cores >= CORES_PER_CARD else share.memory)
            free_cores -= min(cores[card], CORES_PER_CARD)
            free_memory -= min(memory[card], self.card_memory)
        used, free = (tuple(cores), tuple(memory)), (free_cores, free_memory)
        whole, most_cores = list(zip(cores, memory, strict=True)).count((0, 0)), max(CORES_PER_CARD - min(cores), 0)
        return Cards(self.scheme, self.card_memory, *used, *free, whole, most_cores)


def read_cards(capacity: Mapping[str, Quantity]) -> Cards | Unplaceable:
    """Return the cards that a node's capacity offers, all unused, or why there are none to place on."""
    offered = [scheme for scheme in INDEXED if scheme.cores in capacity and _whole(capacity, scheme.cores) != 0]
    if not offered:
        return Unplaceable("no vcuda cards")
    if len(offered) > 1:
        return Unplaceable(f"{offered[0].cores} and {offered[1].cores} both in capacity")
    [scheme] = offered
    cores, memory = _whole(capacity, scheme.cores), _whole(capacity, scheme.memory)
    if cores is None or not CORES_PER_CARD <= cores <= MOST_CARDS * CORES_PER_CARD:
        return Unplaceable(f"{scheme.cores} in capacity is {capacity[scheme.cores]}, not 100 a card")
    if not memory:
        return Unplaceable(f"{scheme.memory} missing in capacity")
    return Cards.unused(scheme, cores // CORES_PER_CARD, memory)


def _whole(capacity: Mapping[str, Quantity], resource: str) -> int | None:
    try:
        return parse_whole(capacity[resource])
    except (KeyError, ValueError):
        return None


class ContainerRequest(msgspec.Struct, frozen=True, gc=False):
    """What one container wants: under 100 cores a share of one card, with MiB of memory; else so many whole cards."""

    container: int
    cores: int
    memory: int

    @property
    def cards(self) -> int:
        """How many whole cards; 0 for a share."""
        return self.cores // CORES_PER_CARD


class CardRequest(msgspec.Struct, frozen=True, gc=False):
    """What a pod wants by one scheme, container by container in the order of its spec; none: it needs no card."""

    scheme: Scheme
    containers: tuple[ContainerRequest, ...]


def read_card_request(pod: Pod) -> CardRequest | Unplaceable | None:
    """Return what the pod wants; None where it wants no card by number; or why no node can serve it."""
    schemes = [scheme for scheme in INDEXED if _asks(pod.spec.containers, scheme)]
    # gpu-manager looks for the card of an init container among the containers (`Allocate` in
    # pkg/services/allocator/nvidia), finds none, and never starts it.
    if any(_asks(pod.spec.init_containers, scheme) for scheme in INDEXED):
        return Unplaceable("init containers cannot get vcuda cards")
    if not schemes:
        return None
    if len(schemes) > 1:
        return Unplaceable(f"asks for both {schemes[0].cores} and {schemes[1].cores}")
    containers = tuple(_container_requests(pod.spec.containers or (), schemes[0]))
    if any(each.cores > CORES_PER_CARD and each.cores % CORES_PER_CARD for each in containers):
        return Unplaceable("cores over 100 must be whole cards, 100 each")
    return CardRequest(schemes[0], containers) if containers else None


def _container_requests(containers: tuple[Container, ...], scheme: Scheme) -> Iterator[ContainerRequest]:
    for number, container in enumerate(containers):
        cores, memory = amount_of(container, scheme.cores), amount_of(container, scheme.memory)
        # A share without memory gets no card in gpu-admission (`IsGPURequiredContainer`); gpu-manager starts none such.
        if cores >= CORES_PER_CARD or (cores and memory):
            yield ContainerRequest(number, cores, memory * scheme.memory_unit)


def _asks(containers: tuple[Container, ...] | None, scheme: Scheme) -> bool:
    return any(amount_of(container, scheme.cores) for container in containers or ())


def names_cards(pod: Pod) -> bool:
    """Return whether a container names a scheme's cores, be it none of them: then the extender is asked to bind it."""
    return any(scheme.cores in resources_of(each) for _, each in pod.all_containers() for scheme in INDEXED)


def amount_of(container: Container, resource: str) -> int:
    """Return how much of a resource is asked for; 0 where it is not, or where the API server would not store it."""
    return _whole(resources_of(container), resource) or 0


class PodCards(msgspec.Struct, frozen=True):
    """The shares that a stored pod has, or is to have, of the cards of ``node``.

    ``is_cut``: its annotations give it more than `MOST_CARDS`; only the first ones are kept.
    """

    node: str
    shares: tuple[Share, ...]
    is_cut: bool = False


_NUMBER = re.compile("[0-9]{1,6}", re.ASCII)

LONGEST_REMEMBERED = 64
"""Characters of an annotation that tells cards and is read once for all that are like it."""


def read_pod_cards(pod: Pod) -> PodCards | None:
    """Return the cards that the pod's annotations give it; None where they give it none, or it has ended.

    A bound pod has them on its node; one that is not bound on the node that was chosen for it.
    """
    annotations = pod.annotations
    if pod.has_ended or not annotations:
        return None
    for scheme in INDEXED:
        node = pod.spec.node_name or annotations.get(str(scheme.predicate_node), "")
        # Tenants can write annotations where no quota is enforced, so what is kept of them is bounded.
        shares = tuple(itertools.islice(_shares(pod, scheme), MOST_CARDS + 1)) if can_be_name(node) else ()
        if shares:
            return PodCards(node, shares[:MOST_CARDS], is_cut=len(shares) > MOST_CARDS)
    return None


def annotations_for(scheme: Scheme, node: str, shares: Mapping[int, tuple[Share, ...]], time: int) -> dict[str, str]:
    """Return what is written on a pod that gets these shares, by container, of a node; ``time`` is Unix nanoseconds."""
    # gpu-manager serves the pods of its node in the order of these times.
    written = {**dict.fromkeys(scheme.predicate_times, str(time)), str(scheme.predicate_node): node}
    if scheme.phase and scheme.phase.placed:
        written[scheme.phase.key] = scheme.phase.placed
    cards = {number: ",".join(str(share.card) for share in got) for number, got in shares.items()}
    return {**written, **{f"{scheme.card_index}{number}": text for number, text in cards.items()}}


def _shares(pod: Pod, scheme: Scheme) -> Iterator[Share]:
    annotations = pod.annotations
    for number, container in enumerate(pod.spec.containers or ()):
        text = annotations.get(f"{scheme.card_index}{number}")
        if text and (cores := amount_of(container, scheme.cores)):
            memory = amount_of(container, scheme.memory) * scheme.memory_unit
            # Pods are alike in this by the thousand, and tell it at every event; what somebody makes up is bounded.
            read = _shares_in if len(text) <= LONGEST_REMEMBERED else _shares_in.__wrapped__
            yield from read(text, cores, memory)


@functools.lru_cache(maxsize=2048)
def _shares_in(text: str, cores: int, memory: int) -> tuple[Share, ...]:
    # No more cards than the container asks for: the owner of a pod can write on it what he likes.
    count = min(max(1, cores // CORES_PER_CARD), MOST_CARDS)
    numbers = (int(part) for part in text.split(",", count)[:count] if _NUMBER.fullmatch(part.strip()))
    return tuple(_share(number, min(cores, CORES_PER_CARD), memory) for number in numbers if number < MOST_CARDS)


@functools.lru_cache(maxsize=4096)
def _share(card: int, cores: int, memory: int) -> Share:
    # One object for all pods that have the same share.
    return Share(card, cores, memory)
