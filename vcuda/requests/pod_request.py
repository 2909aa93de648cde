"""What a pod asks for: its charge, and everything that is wrong with the way it asks."""

import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from vcuda.errors import Fault
from vcuda.k8s_types import Container, Pod, Quantity, parse_whole
from vcuda.quota.model import CORES_PER_CARD, Charge, total
from vcuda.requests.resources import BUILT_IN, NOTHING, PLAIN_CARDS, GpuResources
from vcuda.requests.schemes import Scheme
from vcuda.requests.share_limits import ShareLimits

MALFORMED = "malformed GPU request"
"""How every refusal of a malformed request begins."""

SIDECAR = "Always"
NONE = (0, "0")
"""How the API server writes that a container wants none of a resource, and how people do."""
MOST_UNITS = 10_000_000
"""As many as 5,000 nodes, the most that Kubernetes supports, could have with 2,000 on each."""
NO_MODELS: Mapping[str, Charge] = types.MappingProxyType({})
_PERCENT = re.compile(r"[0-9]{1,3}", re.ASCII)


class PodRequest(msgspec.Struct, frozen=True, gc=False):
    """What a pod takes, by which schemes, and what is wrong with it.

    With ``faults`` the charge holds what could still be read; such a pod is refused where the quota is enforced.
    ``share`` is the most that a container asks for of one card, in cores: 100 where it asks for whole ones.
    ``by_units``: it also asks for what no scheme has. ``has_share``: a container asks for less than a card's cores.
    ``on_models`` is the charge on each model of whose nodes one whole device is less than a card. ``limits`` are
    the libraries that may limit its containers' shares of cards.
    """

    charge: Charge
    schemes: tuple[Scheme, ...]
    faults: tuple[Fault, ...] = ()
    share: int = 0
    by_units: bool = False
    has_share: bool = False
    on_models: Mapping[str, Charge] = NO_MODELS
    limits: tuple[ShareLimits, ...] = ()

    def charge_on(self, model: str) -> Charge:
        """Return what the pod takes of this model's quota."""
        return self.on_models.get(model, self.charge)

    @property
    def asks(self) -> bool:
        """Whether it asks for anything that is charged."""
        return bool(self.schemes) or self.by_units


class ContainerCharge(msgspec.Struct, frozen=True, gc=False):
    """What one container asks for: by a scheme, by units, or both.

    ``charges`` are by what is set against its like in another container: the scheme's name, or the unit's. ``plain`` is
    under which of these it asks for whole devices and says nothing else of them; empty: it does not. ``limits``
    are the libraries that may limit its shares of cards.
    """

    scheme: Scheme | None
    charges: Mapping[str, Charge]
    cores_per_card: int
    faults: tuple[Fault, ...]
    plain: str = ""
    limits: tuple[ShareLimits, ...] = ()

    def charge(self, kind: str, cores: int) -> Charge:
        """Return what it asks for of one kind, where one whole device is worth so many cores."""
        charge = self.charges.get(kind, NOTHING)
        if cores == CORES_PER_CARD or kind != self.plain:
            return charge
        devices = charge.cores // CORES_PER_CARD
        return Charge(devices * cores, 0, devices * cores)


def asks_for_vcuda(pod: Pod, known: GpuResources = BUILT_IN) -> bool:
    """Return whether any container asks for something that is charged, and for more than 0 of it."""
    # Every pod of the cluster passes here, and most ask for no GPU: nothing is made for them, not even a field path.
    # What is charged has a domain in its name; to look for its slash in all names at once is cheaper than one by one.
    spec = pod.spec
    for containers in (spec.containers, spec.init_containers):
        for container in containers or ():
            resources = resources_of(container) if container.resources else {}
            if "/" in "".join(resources):
                for name, quantity in resources.items():
                    if quantity not in NONE and known.counts(name):
                        return True
    return False


def resources_of(container: Container) -> Mapping[str, Quantity]:
    """Return a container's limits, with requests for what the limits leave out, as gpu-manager and HAMi read them."""
    # For stored pods both are equal (Kubernetes wants that of extended resources); a template may have one alone.
    resources = container.resources
    if resources is None:
        return {}
    limits, requests = resources.limits or {}, resources.requests
    if not requests or requests.keys() <= limits.keys():
        return limits
    return {**requests, **limits}


def read_request(pod: Pod, known: GpuResources = BUILT_IN) -> PodRequest:
    """Return what the pod takes while it runs, and every fault, with its field path."""
    containers = tuple(pod.all_containers())
    asked = [_read_container(path, container, known) for path, container in containers]
    requests = [request for request in asked if request]
    schemes = _in_order(request.scheme for request in requests if request.scheme)
    faults = [fault for request in requests for fault in request.faults]
    kinds = dict.fromkeys(kind for request in requests for kind in request.charges)

    def charge_of(cores: int) -> Charge:
        return total(_effective_charge(containers, asked, kind, cores) for kind in kinds)

    worth = known.models.cores if any(request.plain for request in requests) else {}
    by_worth = {cores: charge_of(cores) for cores in {*worth.values(), CORES_PER_CARD}}
    per_card = [request.cores_per_card for request in requests]
    share = min(max(per_card, default=0), CORES_PER_CARD)
    by_units = len(kinds) > len(schemes)
    faults += _core_limit_faults(pod, requests)
    return PodRequest(
        by_worth[CORES_PER_CARD],
        schemes,
        tuple(faults),
        share,
        by_units,
        any(0 < each < CORES_PER_CARD for each in per_card),
        {model: by_worth[cores] for model, cores in worth.items()} if worth else NO_MODELS,
        tuple(dict.fromkeys(limits for request in requests for limits in request.limits)),
    )


def _effective_charge(
    containers: Sequence[tuple[str, Container]], asked: Sequence[ContainerCharge | None], kind: str, cores: int
) -> Charge:
    # By one scheme or unit, since the scheduler sets only like resources against each other.
    # As the scheduler counts a pod (KEP-753, k8s.io/component-helpers `resource.PodRequests`): containers and sidecars
    # against the largest init container, which runs beside the sidecars that were started before it.
    together = largest = Charge()
    for (path, container), request in zip(containers, asked, strict=True):
        charge = request.charge(kind, cores) if request else NOTHING
        if not path.startswith("spec.initContainers"):
            together += charge
        elif container.restart_policy == SIDECAR:
            together += charge
            largest = largest.peak(together)
        else:
            largest = largest.peak(together + charge)
    return together.peak(largest)


def _read_container(path: str, container: Container, known: GpuResources) -> ContainerCharge | None:
    resources = resources_of(container)
    if "/" not in "".join(resources):
        return None
    base = f"{path}.resources.limits"
    amounts, faults = _amounts(base, resources, known)
    if not amounts:
        return None
    schemes = _in_order(known.scheme_of[name] for name in amounts if name in known.scheme_of)
    if len(schemes) > 1:
        names = " and ".join(scheme.name for scheme in schemes)
        faults.append(Fault(base, f"asks by two schemes, {names}; write the resources of one of them"))
    charges, per_card, misshapen = _read_units(base, amounts, known)
    scheme = schemes[0] if schemes else None
    has_unit_share = any(0 < (known.unit_of(name) or NOTHING).cores < CORES_PER_CARD for name in charges)
    limits = known.limits_without_scheme if has_unit_share else ()
    if scheme:
        read = _read_counted if scheme.count else _read_cores
        charge, cores, wrong_shape = read(base, scheme, amounts)
        per_card, misshapen = max(per_card, cores), [*wrong_shape, *misshapen]
        charges[scheme.name] = charge
        # A share is less than the cores of a card, or less than its memory.
        if cores < CORES_PER_CARD or charge.card_memory < charge.cores:
            limits = (*limits, scheme.limits)
    plain = _plain_kind(resources, scheme)
    plain = plain if plain in charges else ""
    return ContainerCharge(scheme, charges, per_card, (*(faults or misshapen),), plain, limits)


def _plain_kind(resources: Mapping[str, Quantity], scheme: Scheme | None) -> str:
    # What else it says of its cards, and be it 0, is what it takes of them, whatever one is on the node.
    if scheme is None or not scheme.counts_plain_cards:
        return PLAIN_CARDS
    others = (name for name in scheme.resources if name != scheme.count)
    return "" if any(name in resources for name in others) else scheme.name


def _amounts(base: str, resources: Mapping[str, Quantity], known: GpuResources) -> tuple[dict[str, int], list[Fault]]:
    # What is no whole number is a fault and stands there as 0, so that the rest of the container is checked too.
    amounts: dict[str, int] = {}
    faults: list[Fault] = []
    for name, quantity in resources.items():
        if not known.counts(name):
            continue
        try:
            amount = parse_whole(quantity)
        except ValueError as error:
            faults.append(_fault(base, name, f"{error}; write a whole number from 0 up"))
            amounts[name] = 0
        else:
            if amount:
                amounts[name] = amount
    return amounts, sorted(faults)


def _read_units(base: str, asked: Mapping[str, int], known: GpuResources) -> tuple[dict[str, Charge], int, list[Fault]]:
    charges: dict[str, Charge] = {}
    faults = []
    per_card = 0
    for name, count in asked.items():
        worth = known.unit_of(name) if name not in known.scheme_of else None
        if worth is None:
            continue
        # Whole cards are a unit's as well as shares: of one card it takes at most all.
        per_card = max(per_card, min(worth.cores, CORES_PER_CARD)) if count else per_card
        if count > MOST_UNITS:
            faults.append(_fault(base, name, f"{count} is larger than any cluster"))
        counted = min(count, MOST_UNITS)
        charges[name] = Charge(counted * worth.cores, counted * worth.memory, counted * worth.card_memory)
    return charges, per_card, faults


def _read_cores(base: str, scheme: Scheme, asked: Mapping[str, int]) -> tuple[Charge, int, list[Fault]]:
    # gpu-manager's way: under 100 cores are a share of one card, multiples of 100 whole cards with all their memory.
    cores = asked.get(scheme.cores, 0)
    memory = asked.get(scheme.memory, 0) * scheme.memory_unit
    faults = []
    if not cores:
        faults.append(_fault(base, scheme.memory, f"memory without cores; add {scheme.cores}"))
    elif cores < CORES_PER_CARD and not memory:
        faults.append(_share_without_memory(base, scheme))
    elif cores > CORES_PER_CARD and cores % CORES_PER_CARD:
        lower = cores - cores % CORES_PER_CARD
        near = f"write {lower} or {lower + CORES_PER_CARD}"
        faults.append(_fault(base, scheme.cores, f"{cores} is more than one card but not whole cards; {near}"))
    if cores < CORES_PER_CARD:
        return Charge(cores, memory), cores, faults
    return Charge(cores, 0, card_memory=cores), cores, faults


def _read_counted(base: str, scheme: Scheme, asked: Mapping[str, int]) -> tuple[Charge, int, list[Fault]]:
    # A number of vGPUs, and the share that each has of its card. Without a number one is meant: the vendors' own
    # webhooks add it (HAMi `MutateAdmission`). Without cores, or with 0, a vGPU may use all of its card, and counts as
    # a whole one. Without memory it gets all of the card's; so it does with 100 cores, which ask for the card alone
    # (HAMi `Coresreq=100`), whatever memory they come with.
    count = asked.get(scheme.count or "", 1)
    cores = asked.get(scheme.cores, 0)
    percentage = asked.get(scheme.memory_percentage or "", 0)
    memory = asked.get(scheme.memory, 0) * scheme.memory_unit
    faults = []
    if cores > CORES_PER_CARD:
        most = f"{cores} is more than one card; write at most 100, the share of each vGPU"
        faults.append(_fault(base, scheme.cores, most))
    if percentage > CORES_PER_CARD:
        faults.append(_fault(base, str(scheme.memory_percentage), f"{percentage} is over 100 percent"))
    if cores >= CORES_PER_CARD:
        memory, percentage = 0, CORES_PER_CARD
    card_memory = 0 if memory else percentage or CORES_PER_CARD
    charge = Charge(count * (cores or CORES_PER_CARD), count * memory, count * card_memory)
    return charge, cores or CORES_PER_CARD, faults


def _core_limit_faults(pod: Pod, requests: list[ContainerCharge]) -> Iterator[Fault]:
    # The annotation lets a pod use more of its card than it asks for (gpu-manager, vcuda-core-limit).
    if not pod.annotations:
        return
    for scheme in _in_order(request.scheme for request in requests if request.scheme):
        text = pod.annotations.get(scheme.core_limit) if scheme.core_limit else None
        if text is None:
            continue
        lowest = max(request.cores_per_card for request in requests if request.scheme is scheme)
        if not (_PERCENT.fullmatch(text) and lowest <= int(text) <= CORES_PER_CARD):
            advice = f"write a whole number from the requested cores to 100: {lowest} to 100"
            if lowest > CORES_PER_CARD:
                advice = "leave it out: whole cards have no limit below them"
            yield Fault(f"metadata.annotations[{scheme.core_limit}]", f"{text!r} is not allowed; {advice}")


def _share_without_memory(base: str, scheme: Scheme) -> Fault:
    unit = "MiB" if scheme.memory_unit == 1 else f"blocks of {scheme.memory_unit} MiB"
    return _fault(base, scheme.cores, f"a share of a card needs memory; add {scheme.memory} in {unit}")


def _fault(base: str, resource: str, message: str) -> Fault:
    return Fault(f"{base}[{resource}]", message)


def _in_order(schemes: Iterable[Scheme]) -> tuple[Scheme, ...]:
    return tuple(dict.fromkeys(schemes))
