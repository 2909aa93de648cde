"""Computes the cards of a node and the used part of each card from the node and its pods, as gpu-admission does.

The capacity of a node has 100 ``vcuda-core`` for each card. Each card has an equal number of the node's
``vcuda-memory`` blocks, and a remainder is not used. The annotations of a pod list the cards of its containers
(tkestack/gpu-admission ``pkg/device``, ``pkg/util``; gpu-manager uses the same rules).
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Container, Pod, Quantity, can_be_name, whole_or_none
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.pod_request import resources_of
from vcuda.requests.schemes import SCHEMES, Scheme

INDEXED = tuple(scheme for scheme in SCHEMES if scheme.card_index)
"""The schemes (vendors' ways to share GPUs) that record the cards of a container by number, in a pod annotation."""

MAX_NODE_CARDS = 1024
"""The most cards of one node. A larger number is treated as a mistake, because it would take much memory."""

MAX_SHARES = 256
"""The most shares that are kept of one pod."""


class Share(NamedTuple):
    """The part of one card that a container uses: cores, and memory in MiB. With 100 cores, all memory is used."""

    card: int
    cores: int
    memory: int


class Unplaceable(NamedTuple):
    """The reason why a pod cannot be placed on a node."""

    text: str
    final: bool = True
    """True if the pod cannot be placed on the node even after other pods end."""


class Cards(msgspec.Struct, frozen=True, gc=False):
    """The used part of each card of a node, and the free totals. A card that is overused has no free part."""

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
    """The free cores of the card with the most free cores."""

    @classmethod
    def unused(cls, scheme: Scheme, count: int, memory: int) -> "Cards":
        """Return ``count`` unused cards of a node. ``memory``: the node's memory, in memory blocks of the scheme."""
        unit = scheme.memory_unit
        nothing = (0,) * count
        free = count * CORES_PER_CARD
        return cls(scheme, memory // count * unit, nothing, nothing, free, memory * unit, count, CORES_PER_CARD)

    def free_of(self, card: int) -> tuple[int, int]:
        """Return the free cores and the free memory in MiB of one card."""
        return max(CORES_PER_CARD - self.used_cores[card], 0), max(self.card_memory - self.used_memory[card], 0)

    def is_whole(self, card: int) -> bool:
        return not self.used_cores[card] and not self.used_memory[card]

    def taken(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards with ``shares`` added to the used parts. Shares of cards that do not exist are ignored."""
        return self._changed(shares, 1)

    def returned(self, shares: Iterable[Share]) -> "Cards":
        """Return the cards without the used parts ``shares``. The caller must have added these shares by `taken`."""
        return self._changed(shares, -1)

    def _changed(self, shares: Iterable[Share], sign: int) -> "Cards":
        cores, memory = list(self.used_cores), list(self.used_memory)
        free_cores, free_memory = self.free_cores, self.free_memory
        for share in shares:
            if not 0 <= share.card < len(cores):  # the annotation may name a card that was removed from the node
                continue
            card = share.card
            # The shares of a card may add up to more than the card. So a card changes the free totals by at most its
            # own size.
            free_cores += min(cores[card], CORES_PER_CARD)
            free_memory += min(memory[card], self.card_memory)
            cores[card] += sign * min(share.cores, CORES_PER_CARD)
            memory[card] += sign * (self.card_memory if share.cores >= CORES_PER_CARD else share.memory)
            free_cores -= min(cores[card], CORES_PER_CARD)
            free_memory -= min(memory[card], self.card_memory)
        used, free = (tuple(cores), tuple(memory)), (free_cores, free_memory)
        whole, most_cores = list(zip(cores, memory, strict=True)).count((0, 0)), max(CORES_PER_CARD - min(cores), 0)
        return Cards(self.scheme, self.card_memory, *used, *free, whole, most_cores)


def read_capacity(capacity: Mapping[str, Quantity]) -> Cards | Unplaceable:
    """Return the cards in a node's capacity, all unused, or the reason why the node has no usable cards."""
    offered = [scheme for scheme in INDEXED if scheme.cores in capacity and whole_or_none(capacity[scheme.cores]) != 0]
    if not offered:
        return Unplaceable("the node has no vcuda cards")
    if len(offered) > 1:
        return Unplaceable(f"the node has both {offered[0].cores} and {offered[1].cores} in its capacity")
    [scheme] = offered
    cores, memory = whole_or_none(capacity[scheme.cores]), whole_or_none(capacity.get(scheme.memory))
    if cores is None or not CORES_PER_CARD <= cores <= MAX_NODE_CARDS * CORES_PER_CARD:
        return Unplaceable(f"{scheme.cores} in the node's capacity must be 100 a card; got {capacity[scheme.cores]}")
    if not memory:
        return Unplaceable(f"{scheme.memory} is missing in the node's capacity")
    return Cards.unused(scheme, cores // CORES_PER_CARD, memory)


class ContainerRequest(msgspec.Struct, frozen=True, gc=False):
    """The request of one container: a part of one card if ``cores`` is less than 100, otherwise whole cards."""

    container: int
    """The index of the container in its pod."""
    cores: int
    memory: int
    """The requested memory in MiB."""

    @property
    def cards(self) -> int:
        """The number of whole cards; 0 if a part of one card is requested."""
        return self.cores // CORES_PER_CARD


class CardRequest(msgspec.Struct, frozen=True, gc=False):
    """The cards that a pod requests by one scheme (a vendor's way to share GPUs), for each container in order."""

    scheme: Scheme
    containers: tuple[ContainerRequest, ...]


def read_card_request(pod: Pod) -> CardRequest | Unplaceable | None:
    """Return the cards that a pod requests from a vendor that gives the cards of a node numbers (`INDEXED`).

    Return None if the pod requests no such cards, and the reason if no node can run the pod.
    """
    schemes = [scheme for scheme in INDEXED if _asks(pod.spec.containers, scheme)]
    # gpu-manager reads a container's cards from pod annotations, and looks only for annotations of regular containers
    # (`Allocate` in pkg/services/allocator/nvidia). So an init container that requests a card never starts.
    if any(_asks(pod.spec.init_containers, scheme) for scheme in INDEXED):
        return Unplaceable("init containers cannot get vcuda cards")
    if not schemes:
        return None
    if len(schemes) > 1:
        return Unplaceable(f"the pod requests both {schemes[0].cores} and {schemes[1].cores}")
    containers = tuple(_container_requests(pod.spec.containers or (), schemes[0]))
    if any(each.cores > CORES_PER_CARD and each.cores % CORES_PER_CARD for each in containers):
        return Unplaceable("a request of more than 100 cores must be a multiple of 100, because it gets whole cards")
    return CardRequest(schemes[0], containers) if containers else None


def _container_requests(containers: tuple[Container, ...], scheme: Scheme) -> Iterator[ContainerRequest]:
    for number, container in enumerate(containers):
        cores, memory = amount_of(container, scheme.cores), amount_of(container, scheme.memory)
        # If a container requests a share of a card without memory, gpu-admission gives it no card
        # (`IsGPURequiredContainer`).
        if cores >= CORES_PER_CARD or (cores and memory):
            yield ContainerRequest(number, cores, memory * scheme.memory_unit)


def _asks(containers: tuple[Container, ...] | None, scheme: Scheme) -> bool:
    return any(amount_of(container, scheme.cores) for container in containers or ())


def names_cards(pod: Pod) -> bool:
    """Return True if a container requests vcuda cores, even 0. The scheduler extender binds only such pods."""
    return any(scheme.cores in resources_of(each) for _, each in pod.all_containers() for scheme in INDEXED)


def amount_of(container: Container, resource: str) -> int:
    """Return the requested amount of a resource; 0 without a request, or if the API server would reject the amount."""
    return whole_or_none(resources_of(container).get(resource)) or 0


class PodCards(msgspec.Struct, frozen=True):
    """The parts of cards that a stored pod uses or will use on the node ``node``."""

    node: str
    shares: tuple[Share, ...]
    """The shares in the pod's annotations, at most `MAX_SHARES`."""
    is_cut: bool = False
    """True if the annotations list more than `MAX_SHARES` shares."""


_NUMBER = re.compile("[0-9]{1,6}", re.ASCII)

MAX_REMEMBERED_LENGTH = 64
"""Annotations with at most this many characters are cached after they are parsed."""


def read_pod_cards(pod: Pod) -> PodCards | None:
    """Return the cards in a pod's annotations; None if the pod has no cards, or has ended.

    The cards are on the node to which the pod is bound. For a pod that is not bound, the annotations name the node.
    """
    annotations = pod.annotations
    if pod.has_ended or not annotations:
        return None
    for scheme in INDEXED:
        node = pod.spec.node_name or annotations.get(str(scheme.predicate_node), "")
        # Tenants can forge a pod's card annotations where no quota is enforced. So read a bounded number of shares.
        shares = tuple(itertools.islice(_shares(pod, scheme), MAX_SHARES + 1)) if can_be_name(node) else ()
        if shares:
            return PodCards(node, shares[:MAX_SHARES], is_cut=len(shares) > MAX_SHARES)
    return None


def allocating(scheme: Scheme, node: str, shares: Mapping[int, tuple[Share, ...]], time: int) -> dict[str, str]:
    """Return the annotations that allocate ``shares`` (by container number) to a pod. ``time``: Unix nanoseconds."""
    # gpu-manager serves the pods of its node in the order of the time in the annotations ``predicate_times``.
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
            # Cache only short annotations. Thousands of pods have equal short annotations. Long annotations would fill
            # the memory.
            read = _shares_in if len(text) <= MAX_REMEMBERED_LENGTH else _shares_in.__wrapped__
            yield from read(text, cores, memory)


@functools.lru_cache(maxsize=2048)
def _shares_in(text: str, cores: int, memory: int) -> tuple[Share, ...]:
    # Users can write any text into a pod's annotation. So parse only as many card numbers as the container requests.
    count = min(max(1, cores // CORES_PER_CARD), MAX_NODE_CARDS)
    numbers = (int(part) for part in text.split(",", count)[:count] if _NUMBER.fullmatch(part.strip()))
    return tuple(_share(number, min(cores, CORES_PER_CARD), memory) for number in numbers if number < MAX_NODE_CARDS)


@functools.lru_cache(maxsize=4096)
def _share(card: int, cores: int, memory: int) -> Share:
    # The cache returns the same object for equal shares, which saves memory.
    return Share(card, cores, memory)
