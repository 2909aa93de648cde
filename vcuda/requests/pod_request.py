"""Reads the GPU request of a pod, computes the charge (quota that the pod takes), and finds faults in the request."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from vcuda.errors import Fault, cut
from vcuda.k8s_types import Check, Container, Pod, Quantity, no_check, parse_whole
from vcuda.quota.model import CORES_PER_CARD, Charge, total
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import BUILT_IN, CLASS_RESOURCE, NOTHING, PLAIN_CARDS, WHOLE_CARD, CardValue, GpuResources
from vcuda.requests.schemes import Scheme
from vcuda.requests.share_limits import ShareLimits

SIDECAR = "Always"
NONE = (0, "0")
"""The amount zero of a resource, as a number (people may write one) and as a string (the API server stores one)."""
MAX_UNITS = 10_000_000
"""The most of one resource in a container: 2,000 for each of the 5,000 nodes that Kubernetes supports."""
_PERCENT = re.compile(r"[0-9]{1,3}", re.ASCII)


class ModelCharges(msgspec.Struct, frozen=True, gc=False):
    """The charges of a pod by GPU model, if they may differ."""

    otherwise: Charge
    """The charge on a model that is not in ``by_model``, without the MIG profiles."""
    by_model: Mapping[str, Charge]
    profiles: tuple[tuple[str, int], ...]
    """The MIG profiles that the pod requests, each with the number of its slices of cards."""
    known: GpuResources

    def on(self, model: str) -> Charge:
        charge = self.by_model.get(model, self.otherwise)
        for profile, count in self.profiles:
            # A new pod that requests an unknown profile is rejected. A stored pod is charged a whole card for each
            # unknown profile.
            charge += (self.known.value_of_profile(profile, model) or WHOLE_CARD) * count
        return charge

    def unknown_profile(self, model: str) -> str | None:
        """Return the first requested MIG profile that the cards of a GPU model do not have."""
        unknown = (each for each, _ in self.profiles if self.known.value_of_profile(each, model) is None)
        return next(unknown, None)


class PodRequest(msgspec.Struct, frozen=True, gc=False):
    """The GPU request of a pod."""

    charge: Charge
    """The charge of the request. If there are faults, the charge covers only the part that could be read.
    It is the largest charge of MIG profiles, which differs by GPU model."""
    schemes: tuple[Scheme, ...]
    faults: tuple[Fault, ...] = ()
    """The faults of the request. A pod with faults is rejected if the quota of its namespace is enforced."""
    by_units: bool = False
    """True if the pod requests a unit: a GPU resource of no vendor's scheme (set of resources), such as a MIG slice."""
    has_share: bool = False
    """True if a container requests a share: less than all cores of a card."""
    on_models: ModelCharges | None = None
    """The pod's charges by GPU model; None if every model has the charge ``charge``."""
    limits: tuple[ShareLimits, ...] = ()
    """Descriptions of the vendors' libraries that may limit the pod's containers to their shares of cards."""
    share_memory: int = 0
    """The most memory of one card that any container of the pod requests, in MiB."""
    registered: tuple[Scheme, ...] = ()
    """The requested schemes whose register (the node annotation that lists the cards) the pod's node must have."""
    resources: Mapping[str, int] = {}
    """The amounts of resources that the pod's node must at least offer. Resources of DeviceClasses are left out: no
    node offers them."""

    def charge_on(self, model: str) -> Charge:
        return self.on_models.on(model) if self.on_models else self.charge

    @property
    def asks(self) -> bool:
        """True if the pod requests a GPU resource that is charged."""
        return bool(self.schemes) or self.by_units


class ContainerCharge(msgspec.Struct, frozen=True, gc=False):
    """The GPU request of one container, for resources of a vendor's scheme, units (resources of no scheme), or both."""

    scheme: Scheme | None
    charges: Mapping[str, Charge]
    """The container's charge for its scheme and for each of its units. The key is the name of the scheme or unit."""
    cores_per_card: int
    """The most cores of one card that the container requests."""
    faults: tuple[Fault, ...]
    plain: str = ""
    """The scheme or unit of which the container requests only a number of devices, not cores or memory; or empty."""
    by_memory: str = ""
    """The name of the scheme if the container's cores are charged in proportion to its memory; otherwise empty."""
    limits: tuple[ShareLimits, ...] = ()
    """Descriptions of the vendors' libraries that may limit the container to its shares of cards."""
    memory_per_card: int = 0
    """The memory of one card that the container requests, in MiB."""
    amounts: Mapping[str, int] = {}
    """The requested amounts of GPU resources."""

    @property
    def needs_register(self) -> bool:
        """True if the node must have a register, the annotation by which the vendor lists the node's cards.

        A request for only a number of cards needs no register, because NVIDIA's own device plugin can serve it too.
        """
        return self.scheme is not None and self.scheme.register is not None and self.plain != self.scheme.name

    def charge(self, kind: str, value: CardValue) -> Charge:
        """Return the charge for one kind of resource on a GPU model whose devices have the size ``value``.

        ``kind``: the name of a vendor's scheme, or of a unit (a resource of no scheme).
        """
        charge = self.charges.get(kind, NOTHING)
        # If a container states no cores, each of its devices is charged 100 cores. So this quotient is the number of
        # devices.
        devices = charge.cores // CORES_PER_CARD
        if kind == self.plain and value.cores != CORES_PER_CARD:
            return Charge(devices * value.cores, 0, devices * value.cores)
        if kind == self.by_memory and devices and (charge.card_memory or value.memory):
            cores = charge.card_memory or devices * -(-charge.memory * CORES_PER_CARD // (devices * value.memory))
            return Charge(max(cores, devices), charge.memory, charge.card_memory)
        return charge


def requests_gpus(pod: Pod, known: GpuResources = BUILT_IN) -> bool:
    """Return whether any container of the pod requests more than 0 of a GPU resource that is charged."""
    # This function runs for every pod of the cluster, and most pods request no GPU. So it must be fast. All names of
    # charged resources contain a slash, and one search for a slash in the joined names is the fastest check.
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
    """Return a container's limits, and its requests for resources without a limit. gpu-manager and HAMi do the same."""
    # In stored pods limits and requests are equal, as Kubernetes requires for extended resources. A pod template may
    # have only limits or only requests.
    resources = container.resources
    if resources is None:
        return {}
    limits, requests = resources.limits or {}, resources.requests
    if not requests or requests.keys() <= limits.keys():
        return limits
    return {**requests, **limits}


def read_request(pod: Pod, known: GpuResources = BUILT_IN, check: Check = no_check) -> PodRequest:
    containers = tuple(pod.all_containers())
    by_container = [_read_container(path, container, known) for path, container in containers]
    requests = [request for request in by_container if request]
    schemes = _in_order(request.scheme for request in requests if request.scheme)
    faults = [fault for request in requests for fault in request.faults]
    kinds: dict[str, list[tuple[str, Container, ContainerCharge]]] = {}
    for (path, container), request in zip(containers, by_container, strict=True):
        if request:
            for kind in request.charges:
                kinds.setdefault(kind, []).append((path, container, request))

    profiles = [kind for kind in kinds if kind.startswith(PROFILE)]
    unsliced = [kind for kind in kinds if not kind.startswith(PROFILE)] if profiles else kinds

    def charge_of(value: CardValue) -> Charge:
        return total(_effective_charge(kinds[kind], kind, value) for kind in unsliced)

    card_values = known.card_values if any(request.plain or request.by_memory for request in requests) else {}
    different = {*card_values.values(), CardValue()}
    check((len(different) - 1) * sum(map(len, kinds.values())))
    by_value = {value: charge_of(value) for value in different}
    otherwise = by_value[CardValue()]
    by_profile = {kind: _effective_charge(kinds[kind], kind, CardValue()) for kind in profiles}
    on_models = None
    if card_values or profiles:
        by_model = {model: by_value[value] for model, value in card_values.items()}
        counts = tuple(
            (kind.removeprefix(PROFILE), _count(each, known.unit_of(kind))) for kind, each in by_profile.items()
        )
        on_models = ModelCharges(otherwise, by_model, counts, known)
    faults += _core_limit_faults(pod, requests)
    return PodRequest(
        total((otherwise, *by_profile.values())),
        schemes,
        tuple(faults),
        by_units=len(kinds) > len(schemes),
        has_share=any(0 < request.cores_per_card < CORES_PER_CARD for request in requests),
        on_models=on_models,
        limits=tuple(dict.fromkeys(limits for request in requests for limits in request.limits)),
        share_memory=max((request.memory_per_card for request in requests), default=0),
        registered=_in_order(each.scheme for each in requests if each.scheme and each.needs_register),
        resources=_needed(
            [*(each.main_resource for each in schemes), *_units(kinds, schemes)], containers, by_container
        ),
    )


def _count(charge: Charge, value: Charge | None) -> int:
    return int(charge.cores // value.cores) if value and value.cores else 0


def _units(kinds: Iterable[str], schemes: Iterable[Scheme]) -> Iterator[str]:
    names = {scheme.name for scheme in schemes}
    return (kind for kind in kinds if kind not in names and not kind.startswith(CLASS_RESOURCE))


def _needed(
    names: Iterable[str], containers: Iterable[tuple[str, Container]], by_container: Iterable[ContainerCharge | None]
) -> dict[str, int]:
    # The scheduler adds up the requests of a pod's sidecars. Here each init container, also a sidecar, counts alone. So
    # the amount may be too small.
    alone = dict.fromkeys(names, 1)
    together: dict[str, int] = {}
    for (path, _), request in zip(containers, by_container, strict=True):
        if request is None:
            continue
        is_init = path.startswith("spec.initContainers")
        for name, amount in request.amounts.items():
            if is_init and amount > alone.get(name, amount):
                alone[name] = amount
            elif not is_init:
                together[name] = together.get(name, 0) + amount
    return {name: max(amount, together.get(name, 0)) for name, amount in alone.items()}


def _effective_charge(parts: Iterable[tuple[str, Container, ContainerCharge]], kind: str, value: CardValue) -> Charge:
    # The scheduler counts each resource separately, as the larger of two sums (KEP-753, k8s.io/component-helpers
    # `resource.PodRequests`). The first sum has all containers and sidecars. The second sum has one init container and
    # the sidecars that start before it.
    together = largest = Charge()
    for path, container, request in parts:
        charge = request.charge(kind, value)
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
        faults.append(Fault(base, f"a container must request resources of only one vendor; got resources of {names}"))
    charges, per_card = _read_units(amounts, known)
    scheme = schemes[0] if schemes else None
    has_unit_share = any(0 < (known.unit_of(name) or NOTHING).cores < CORES_PER_CARD for name in charges)
    limits = known.limits_without_scheme if has_unit_share else ()
    if scheme:
        read = _read_counted if scheme.count else _read_cores
        charge, cores, misshapen = read(base, scheme, amounts)
        per_card, faults = max(per_card, cores), faults or misshapen
        charges[scheme.name] = charge
        # The vendor's library limits only shares of a card: requests for less than all cores, or less than all memory.
        if cores < CORES_PER_CARD or charge.card_memory < charge.cores:
            limits = (*limits, scheme.limits)
    plain = _plain_kind(resources, scheme)
    plain = plain if plain in charges else ""
    by_memory = scheme.name if scheme and scheme.cores_by_memory and scheme.cores not in amounts else ""
    return ContainerCharge(
        scheme,
        charges,
        cores_per_card=per_card,
        faults=tuple(faults),
        plain=plain,
        by_memory=by_memory,
        limits=limits,
        memory_per_card=_memory_per_card(scheme, amounts),
        amounts=amounts,
    )


def _memory_per_card(scheme: Scheme | None, amounts: Mapping[str, int]) -> int:
    # A request for 100 cores or more is for whole cards with all their memory. Then the requested memory has no effect.
    whole = scheme is None or amounts.get(scheme.cores, 0) >= CORES_PER_CARD
    return 0 if scheme is None or whole else amounts.get(scheme.memory, 0) * scheme.memory_unit


def _plain_kind(resources: Mapping[str, Quantity], scheme: Scheme | None) -> str:
    # If a container requests only a number of cards, the GPU model determines the charge. If the container also sets
    # cores or memory, even 0, these amounts determine the charge.
    if scheme is None or not scheme.counts_plain_cards:
        return PLAIN_CARDS
    rest = (name for name in scheme.resources if name != scheme.count)
    return "" if any(name in resources for name in rest) else scheme.name


def _amounts(base: str, resources: Mapping[str, Quantity], known: GpuResources) -> tuple[dict[str, int], list[Fault]]:
    # An amount that is not a whole number is a fault and counts as 0, so that the other amounts are still checked.
    amounts: dict[str, int] = {}
    faults: list[Fault] = []
    for name, quantity in resources.items():
        if not known.counts(name):
            continue
        try:
            amount = parse_whole(quantity)
        except ValueError as error:
            faults.append(_fault(base, name, f"must be a whole number of at least 0: {cut(str(error))}"))
            amounts[name] = 0
        else:
            if amount > MAX_UNITS:
                faults.append(_fault(base, name, f"must be at most {MAX_UNITS}; got {amount}"))
            if amount:
                amounts[name] = min(amount, MAX_UNITS)
    return amounts, sorted(faults)


def _read_units(amounts: Mapping[str, int], known: GpuResources) -> tuple[dict[str, Charge], int]:
    charges: dict[str, Charge] = {}
    per_card = 0
    for name, count in amounts.items():
        value = known.unit_of(name) if name not in known.scheme_of else None
        if value is None:
            continue
        # One unit may be charged several cards. Then it takes at most the 100 cores of one card from each of these
        # cards.
        per_card = max(per_card, min(math.ceil(value.cores), CORES_PER_CARD)) if count else per_card
        charges[name] = value * count
    return charges, per_card


def _read_cores(base: str, scheme: Scheme, amounts: Mapping[str, int]) -> tuple[Charge, int, list[Fault]]:
    # For gpu-manager, fewer than 100 cores are a share of one card. Multiples of 100 are whole cards.
    cores = amounts.get(scheme.cores, 0)
    memory = amounts.get(scheme.memory, 0) * scheme.memory_unit
    faults = []
    if not cores:
        faults.append(
            _fault(base, scheme.memory, f"GPU memory must be requested together with cores; add {scheme.cores}")
        )
    elif cores < CORES_PER_CARD and not memory:
        unit = "MiB" if scheme.memory_unit == 1 else f"blocks of {scheme.memory_unit} MiB"
        faults.append(_fault(base, scheme.cores, f"a share of a card needs memory; add {scheme.memory} in {unit}"))
    elif cores > CORES_PER_CARD and cores % CORES_PER_CARD:
        lower = cores - cores % CORES_PER_CARD
        higher = lower + CORES_PER_CARD
        message = f"{cores} is more than one card but not whole cards; write {lower} or {higher}"
        faults.append(_fault(base, scheme.cores, message))
    if cores < CORES_PER_CARD:
        # A share without memory is a fault. In a stored pod, such a share is charged memory in proportion to its cores.
        return Charge(cores, memory, 0 if memory else cores), cores, faults
    return Charge(cores, 0, card_memory=cores), cores, faults


def _read_counted(base: str, scheme: Scheme, amounts: Mapping[str, int]) -> tuple[Charge, int, list[Fault]]:
    # The request states a number of vGPUs, and the share of a card for each vGPU.
    # - A request without a number is for one vGPU, because the vendors' webhooks add 1 (HAMi `MutateAdmission`).
    # - A vGPU without cores, or with 0 cores, may use all cores of its card, and is charged all cores.
    # - A vGPU without memory, or with 100 cores, gets all memory of its card. 100 cores request the card exclusively
    #   (HAMi `Coresreq=100`). Then the requested memory has no effect.
    count = amounts.get(scheme.count or "", 1)
    cores = amounts.get(scheme.cores, 0)
    percentage = amounts.get(scheme.memory_percentage or "", 0)
    memory = amounts.get(scheme.memory, 0) * scheme.memory_unit
    faults = []
    if cores > CORES_PER_CARD:
        faults.append(_fault(base, scheme.cores, f"a vGPU must have at most 100 cores (one card); got {cores}"))
    if percentage > CORES_PER_CARD:
        faults.append(_fault(base, str(scheme.memory_percentage), f"must be at most 100 percent; got {percentage}"))
    if cores >= CORES_PER_CARD:
        memory, percentage = 0, CORES_PER_CARD
    card_memory = 0 if memory else percentage or CORES_PER_CARD
    charge = Charge(count * (cores or CORES_PER_CARD), count * memory, count * card_memory)
    return charge, cores or CORES_PER_CARD, faults


def _core_limit_faults(pod: Pod, requests: list[ContainerCharge]) -> Iterator[Fault]:
    # The annotation vcuda-core-limit of gpu-manager allows a pod to use more cores of its card than it requests.
    if not pod.annotations:
        return
    for scheme in _in_order(request.scheme for request in requests if request.scheme):
        text = pod.annotations.get(scheme.core_limit) if scheme.core_limit else None
        if text is None:
            continue
        lowest = max(request.cores_per_card for request in requests if request.scheme is scheme)
        if not (_PERCENT.fullmatch(text) and lowest <= int(text) <= CORES_PER_CARD):
            message = f"must be a whole number from {lowest} (the requested cores) to 100; got {cut(text)!r}"
            if lowest > CORES_PER_CARD:
                message = f"must not be set, because whole cards cannot have a lower limit; got {cut(text)!r}"
            yield Fault(f"metadata.annotations[{scheme.core_limit}]", message)


def _fault(base: str, resource: str, message: str) -> Fault:
    return Fault(f"{base}[{resource}]", message)


def _in_order(schemes: Iterable[Scheme]) -> tuple[Scheme, ...]:
    return tuple(dict.fromkeys(schemes))
