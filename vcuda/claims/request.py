"""Reads the digest of a claim (a short form of its spec): the device requests that are charged, and their faults."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from vcuda.claims.cel import Facts
from vcuda.claims.charges import ClaimEntry, ClaimPolicy, ClaimRequest
from vcuda.claims.digest import ClaimDigest, EntryDigest, EntryRead
from vcuda.claims.drivers import CORES, MEMORY, DeviceKind, Kind, find_kind
from vcuda.claims.names import PRODUCT, PROFILE
from vcuda.claims.objects import EXACT_COUNT
from vcuda.claims.pin import MAX_SELECTORS, ClaimPin
from vcuda.errors import Fault
from vcuda.k8s_types import Quantity, parse_quantity
from vcuda.requests.mig import unknown_profile

MAX_DEVICES = 32
"""The API server's limit on the devices of one claim (AllocationResultsMaxSize in k8s.io/api `resource/v1`)."""

_MOST = 2**53
"""The largest amount of a capacity that a claim may request. No device has more."""


def read_claim(digest: ClaimDigest, policy: ClaimPolicy) -> ClaimRequest:
    """Return the device requests of a claim, and their faults. Each fault has a field path and a message."""
    entries: list[ClaimEntry] = []
    faults: list[Fault] = [*digest.faults]
    reads = digest.entries()
    for index, request in enumerate(digest.requests):
        base = f"spec.devices.requests[{index}]"
        if not request.entries:
            faults.append(Fault(base, "must have the field `exactly` or the field `firstAvailable`"))
        for read in itertools.islice(reads, len(request.entries)):
            path, entry = f"{base}.{read.entry.field}", read.entry
            found = find_kind(entry.device_class_name, policy.devices, policy.value_of)
            if found is None:
                faults.append(_unknown_class(path, entry.device_class_name))
            # An entry for devices that are not GPUs is not checked, because such devices are not charged.
            elif found.is_gpu:
                faults.extend(_shape_faults(path, read, found))
                profile = _profile_of(read, found)
                if found.kind is Kind.MIG and profile and policy.resources.value_of_profile(profile) is None:
                    faults.append(Fault(f"{path}.selectors", unknown_profile(profile)))
                capacities, wrong = _read_capacities(path, entry, found, policy)
                faults.extend(wrong)
                name = "/".join(filter(None, (request.name, entry.name)))
                entries.append(_entry(path, name, read, found, capacities))
    faults.extend(_config_faults(digest, entries))
    return ClaimRequest(tuple(entries), tuple(faults), policy, digest)


def _config_faults(digest: ClaimDigest, entries: Iterable[ClaimEntry]) -> Iterator[Fault]:
    # Parameters in a claim can make HAMi's driver replace its limits by MPS (`applySharingConfig` in
    # cmd/hami-kubelet-plugin). Future releases may have other such parameters. So a share of a card must have none.
    names = [request.name for request in digest.requests]
    shares = {(entry.found.driver, names[entry.request]) for entry in entries if entry.found.kind is Kind.SHARE}
    for index, config in enumerate(digest.config):
        named = config.requests
        if any(driver == config.driver and (not named or request in named) for driver, request in shares):
            message = "must not be set for shares of a card, because parameters may turn off the limits of a share."
            advice = "Limit the parameters to other requests by the field `requests` of this config"
            yield Fault(f"spec.devices.config[{index}].opaque", f"{message} {advice}")


def _profile_of(read: EntryRead, found: DeviceKind) -> str:
    """Return the MIG profile that the entry's selectors or its DeviceClass require; empty if they require none."""
    return Facts(attributes=read.attributes).only(found.driver or "", PROFILE) or found.profile


def _entry(path: str, name: str, read: EntryRead, found: DeviceKind, capacities: Mapping[str, Decimal]) -> ClaimEntry:
    driver, entry = found.driver or "", read.entry
    return ClaimEntry(
        path=path,
        request=read.request,
        name=name,
        found=found,
        # An invalid count is charged as 1. A claim with an invalid count is admitted only in the modes warn and audit.
        count=entry.count if entry.count and 0 < entry.count <= MAX_DEVICES else 1,
        capacities=capacities,
        has_selectors=entry.selectors > 0,
        pins=_pins_of(read, found),
        profile=_profile_of(read, found),
        products=read.attributes.get((driver, PRODUCT)),
    )


def _pins_of(read: EntryRead, found: DeviceKind) -> tuple[ClaimPin, ...]:
    """Return the entry's pins (selectors for one GPU model) for its own driver. A device must match all pins."""
    return tuple(pin for pin in read.pins if pin.driver == (found.driver or ""))


def _unknown_class(path: str, name: str) -> Fault:
    message = (
        f"no value is configured for a device of DeviceClass {name}. Ask your administrator to add a line to "
        f"`gpu_units`: `deviceclass/{name}: {{cards: 1}}`, or `deviceclass/{name}: {{}}` if it is not a GPU"
    )
    return Fault(f"{path}.deviceClassName", message)


def _shape_faults(path: str, read: EntryRead, found: DeviceKind) -> Iterator[Fault]:
    entry = read.entry
    if found.driver is None:
        name = entry.device_class_name
        message = f"the selectors of DeviceClass {name} name no driver, so its devices cannot be pinned to a GPU model."
        advice = 'Ask your administrator to add device.driver == "…" to the selectors of the DeviceClass'
        yield Fault(f"{path}.deviceClassName", f"{message} {advice}")
    if entry.allocation_mode not in ("", EXACT_COUNT):
        message = f"must be {EXACT_COUNT}, with a count; got {entry.allocation_mode}"
        yield Fault(f"{path}.allocationMode", message)
    if entry.admin_access:
        yield Fault(
            f"{path}.adminAccess",
            "must not be true in a namespace with a GPU quota, because the claim could get devices of other claims",
        )
    if entry.count is not None and not 0 < entry.count <= MAX_DEVICES:
        yield Fault(f"{path}.count", f"must be from 1 to {MAX_DEVICES}; got {entry.count}")
    if entry.selectors >= MAX_SELECTORS and not _pins_of(read, found):
        message = f"must not have more than {MAX_SELECTORS - 1} selectors, because the webhook adds one"
        yield Fault(f"{path}.selectors", message)


def _read_capacities(
    path: str, entry: EntryDigest, found: DeviceKind, policy: ClaimPolicy
) -> tuple[dict[str, Decimal], list[Fault]]:
    # A requested capacity only filters unshared devices. So a claim may name any capacity of such devices.
    known = {CORES, MEMORY} if found.kind is Kind.SHARE else policy.capacities_of.get(found.driver or "", frozenset())
    capacities: dict[str, Decimal] = {}
    faults = []
    for name, quantity in entry.capacities:
        field = f"{path}.capacity.requests[{name}]"
        if known and name not in known:
            faults.append(
                Fault(field, f"unsupported capacity of these devices; supported capacities: {', '.join(sorted(known))}")
            )
            continue
        try:
            capacities[name] = _read_amount(quantity)
        except ValueError as error:
            faults.append(Fault(field, f"{error}; must be a quantity of at least 0"))
    return capacities, faults


def _read_amount(quantity: Quantity) -> Decimal:
    amount = parse_quantity(quantity)
    # A negative capacity is rejected here, because the API server accepts it, and the scheduler then counts nothing.
    if amount < 0:
        raise ValueError(f"{quantity} is negative")
    if amount > _MOST:
        raise ValueError(f"{quantity} is larger than any cluster")
    return amount
