"""Computes the cards of a node and their use from the node and its pods, as gpu-admission does.

The capacity of a node has 100 ``vcuda-core`` for each card. ``vcuda-memory`` is divided evenly between the cards in
whole blocks, and the remainder is not used. The annotations of a pod list the cards of its containers
(tkestack/gpu-admission ``pkg/device``, ``pkg/util``; gpu-manager uses the same rules).
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
"""The most cards of one node. A larger number is a mistake, and would cost memory."""


class Share(NamedTuple):
    """The part of one card that a container has: cores, and memory in MiB. With 100 cores it has all memory."""

    card: int
    cores: int
    memory: int


class Unplaceable(NamedTuple):
    """The reason why a pod cannot be placed on a node."""

    text: str
    final: bool = True
    """True if the reason remains even after other pods on the node end."""


class Cards(msgspec.Struct, frozen=True, gc=False):
    """The use of a node's cards, and the sums. If the use of a card exceeds the card, nothing of the card is free."""

    scheme: Scheme
    card_memory: int
    """The memory of one card in MiB."""
    used_cores: tuple[int, ...]
    """The used cores of each card, by the card's number."""
    used_memory: tuple[int, ...]
    """The used MiB of each card, by the card's number."""
    free_cores: int
    """The free cores of all cards."""
    free_memory: int
    """The free MiB of the node, including the remainder that cannot be divided between the cards."""
    whole: int
    """The number of unused cards."""
    most_cores: int
    """The free cores of the card that has the most."""

    @classmethod
    def unused(cls, scheme: Scheme, count: int, memory: int) -> "Cards":
        """Return ``count`` unused cards of a node with ``memory`` blocks of the scheme's unit."""
        unit = scheme.memory_unit
        nothing = (0,) * count
        free = count * CORES_PER_CARD
        return cls(scheme, memory // count * unit, nothing, nothing, free, memory * unit, count, CORES_PER_CARD)

    def free_of(self, card: int) -> tuple[int, int]:
        """Return the free cores and the free memory in MiB of one card."""
        return max(CORES_PER_CARD - self.used_cores[card], 0), max(self.card_memory - self.used_memory[card], 0)

    def is_whole(self, card: int) -> bool:
        return not self.used_cores[card] and not self.used_memory[card]

    def fragmented_cores(self) -> int:
        """Return the free cores of cards in use. A pod that requests whole cards cannot use these cores."""
        return self.free_cores - self.whole * CORES_PER_CARD

    def taken(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards with these shares in use too. A share of a card that the node does not have is ignored."""
        return self._changed(shares, 1)

    def returned(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards without these shares, which must be in use."""
        return self._changed(shares, -1)

    def _changed(self, shares: Iterable[Share], sign: int) -> "Cards":
        cores, memory = list(self.used_cores), list(self.used_memory)
        free_cores, free_memory = self.free_cores, self.free_memory
        for share in shares:
            if not 0 <= share.card < len(cores):  # an annotation may name a card that was removed since
                continue
            card = share.card
            # The use may exceed the card. So the card's part of the sums is subtracted here, and added again below.
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
    """Return the cards in a node's capacity, all unused. If there are no cards, return the reason."""
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
    """The request of one container: a share of one card if ``cores`` is less than 100, otherwise whole cards."""

    container: int
    """The index of the container in its pod."""
    cores: int
    memory: int
    """The requested memory in MiB."""

    @property
    def cards(self) -> int:
        """The number of whole cards; 0 for a share."""
        return self.cores // CORES_PER_CARD


class CardRequest(msgspec.Struct, frozen=True, gc=False):
    """The request of a pod by one scheme. ``containers``: those that request cards, in the order of the spec."""

    scheme: Scheme
    containers: tuple[ContainerRequest, ...]


def read_card_request(pod: Pod) -> CardRequest | Unplaceable | None:
    """Return the request of the pod, or the reason why no node can have it. None if it requests no card by number."""
    schemes = [scheme for scheme in INDEXED if _asks(pod.spec.containers, scheme)]
    # For the card of an init container, gpu-manager searches only the other containers (`Allocate` in
    # pkg/services/allocator/nvidia). It does not find the card, and never starts the init container.
    if any(_asks(pod.spec.init_containers, scheme) for scheme in INDEXED):
        return Unplaceable("init containers cannot get vcuda cards")
    if not schemes:
        return None
    if len(schemes) > 1:
        return Unplaceable(f"requests both {schemes[0].cores} and {schemes[1].cores}")
    containers = tuple(_container_requests(pod.spec.containers or (), schemes[0]))
    if any(each.cores > CORES_PER_CARD and each.cores % CORES_PER_CARD for each in containers):
        return Unplaceable("cores over 100 must be whole cards, 100 each")
    return CardRequest(schemes[0], containers) if containers else None


def _container_requests(containers: tuple[Container, ...], scheme: Scheme) -> Iterator[ContainerRequest]:
    for number, container in enumerate(containers):
        cores, memory = amount_of(container, scheme.cores), amount_of(container, scheme.memory)
        # gpu-admission gives no card to a share without memory (`IsGPURequiredContainer`): gpu-manager never starts it.
        if cores >= CORES_PER_CARD or (cores and memory):
            yield ContainerRequest(number, cores, memory * scheme.memory_unit)


def _asks(containers: tuple[Container, ...] | None, scheme: Scheme) -> bool:
    return any(amount_of(container, scheme.cores) for container in containers or ())


def names_cards(pod: Pod) -> bool:
    """Return whether a container names a scheme's cores, even 0. kube-scheduler lets the extender bind such a pod."""
    return any(scheme.cores in resources_of(each) for _, each in pod.all_containers() for scheme in INDEXED)


def amount_of(container: Container, resource: str) -> int:
    """Return the requested amount of a resource; 0 if there is no request, or if the API server would reject it."""
    return _whole(resources_of(container), resource) or 0


class PodCards(msgspec.Struct, frozen=True):
    """The shares of the cards of ``node`` that a stored pod has or will have."""

    node: str
    shares: tuple[Share, ...]
    """The shares in the pod's annotations, at most `MOST_CARDS`."""
    is_cut: bool = False
    """True if the annotations list more shares."""


_NUMBER = re.compile("[0-9]{1,6}", re.ASCII)

LONGEST_REMEMBERED = 64
"""The most characters of an annotation with cards whose result is remembered for all equal annotations."""


def read_pod_cards(pod: Pod) -> PodCards | None:
    """Return the cards in a pod's annotations. They are on the pod's node, or else on the node that the scheduler
    chose. None if the pod has no cards, or has ended."""
    annotations = pod.annotations
    if pod.has_ended or not annotations:
        return None
    for scheme in INDEXED:
        node = pod.spec.node_name or annotations.get(str(scheme.predicate_node), "")
        # Without an enforced quota, tenants can write these annotations. So the number of shares is bounded.
        shares = tuple(itertools.islice(_shares(pod, scheme), MOST_CARDS + 1)) if can_be_name(node) else ()
        if shares:
            return PodCards(node, shares[:MOST_CARDS], is_cut=len(shares) > MOST_CARDS)
    return None


def annotations_for(scheme: Scheme, node: str, shares: Mapping[int, tuple[Share, ...]], time: int) -> dict[str, str]:
    """Return the annotations that give a pod these shares of a node, by container. ``time``: Unix nanoseconds."""
    # gpu-manager serves the pods of its node in the order of this time.
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
            # Thousands of pods have equal annotations, and each event has them again. Long annotations are not
            # remembered.
            read = _shares_in if len(text) <= LONGEST_REMEMBERED else _shares_in.__wrapped__
            yield from read(text, cores, memory)


@functools.lru_cache(maxsize=2048)
def _shares_in(text: str, cores: int, memory: int) -> tuple[Share, ...]:
    # The owner of a pod can write any annotation. So no more cards are read than the container requests.
    count = min(max(1, cores // CORES_PER_CARD), MOST_CARDS)
    numbers = (int(part) for part in text.split(",", count)[:count] if _NUMBER.fullmatch(part.strip()))
    return tuple(_share(number, min(cores, CORES_PER_CARD), memory) for number in numbers if number < MOST_CARDS)


@functools.lru_cache(maxsize=4096)
def _share(card: int, cores: int, memory: int) -> Share:
    # Pods with equal shares use one object.
    return Share(card, cores, memory)
