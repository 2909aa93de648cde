"""What a pod wants of its node's cards, by the schemes whose scheduler numbers them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from vcuda.cards import INDEXED, Reason
from vcuda.charge import CORES_PER_CARD
from vcuda.objects import Container, Pod
from vcuda.quantities import parse_whole
from vcuda.requests import resources_of
from vcuda.schemes import Scheme


class Demand(msgspec.Struct, frozen=True, gc=False):
    """What one container wants: under 100 cores a share of one card, with MiB of memory; else so many whole cards."""

    container: int
    cores: int
    memory: int

    @property
    def cards(self) -> int:
        """How many whole cards; 0 for a share."""
        return self.cores // CORES_PER_CARD


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What a pod wants by one scheme, container by container in the order of its spec; none: it needs no card."""

    scheme: Scheme
    demands: tuple[Demand, ...]


def read_wish(pod: Pod) -> Wish | Reason | None:
    """Return what the pod wants; None where it wants no card by number; or why no node can serve it.

    As in gpu-admission, a share without memory gets no card (``IsGPURequiredContainer``): gpu-manager starts no such
    container. Nor does it start an init container with vcuda: it looks for the card of one among the containers
    (``Allocate`` in ``pkg/services/allocator/nvidia``), so that is a reason here.
    """
    schemes = [scheme for scheme in INDEXED if _asks(pod.spec.containers, scheme)]
    if any(_asks(pod.spec.init_containers, scheme) for scheme in INDEXED):
        return Reason("init containers cannot get vcuda cards")
    if not schemes:
        return None
    if len(schemes) > 1:
        return Reason(f"asks for both {schemes[0].cores} and {schemes[1].cores}")
    demands = tuple(_demands(pod.spec.containers or (), schemes[0]))
    if any(demand.cores > CORES_PER_CARD and demand.cores % CORES_PER_CARD for demand in demands):
        return Reason("cores over 100 must be whole cards, 100 each")
    return Wish(schemes[0], demands) if demands else None


def _demands(containers: tuple[Container, ...], scheme: Scheme) -> Iterator[Demand]:
    for number, container in enumerate(containers):
        cores, memory = amount_of(container, scheme.cores), amount_of(container, scheme.memory)
        if cores >= CORES_PER_CARD or (cores and memory):
            yield Demand(number, cores, memory * scheme.memory_unit)


def _asks(containers: tuple[Container, ...] | None, scheme: Scheme) -> bool:
    return any(amount_of(container, scheme.cores) for container in containers or ())


def amount_of(container: Container, resource: str) -> int:
    """Return how much of a resource is asked for; 0 where it is not, or where the API server would not store it."""
    resources = resources_of(container)
    if resource not in resources:
        return 0
    try:
        return parse_whole(resources[resource])
    except ValueError:
        return 0
