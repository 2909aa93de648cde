"""The ledger of one namespace: the charges to its quota, and the decision whether one more charge fits.

Every decision is made against one version of the ledger. In this version, ``committed`` and ``pending`` contain every
pod that may be stored. ``terminating`` contains every deleted pod whose containers may still run. The decision is
written by compare-and-swap on this version. So concurrent writers can only charge too much, never too little.
"""

import base64
import binascii
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated

import msgspec

from vcuda.quota.model import COMMON_DENOMINATOR, Charge, Limit, NamespaceQuota, Usage, fits, total
from vcuda.quota.shortage import Shortage, find_shortage

MAX_PENDING = 512
"""The most pending charges of a namespace. The limit keeps the ledger small if a controller creates pods endlessly."""

MAX_TERMINATING = 512
"""The most charges of deleted pods in ``terminating``. The charges of further deleted pods stay in ``committed``."""

RESERVATION_SECONDS = 10
"""A webhook replica may admit pods from its reservation (quota that it holds in advance) for this many seconds after it
sent its last confirmed write of the ledger."""

MARGIN_SECONDS = 2
"""Seconds that are added to each duration that another process measures, because clocks drift and round."""

LOST = "lost"
"""While ``reserved`` has an entry with this key, the ledger is closed: it may lack charges, so it admits none."""

UNSEEN_SECONDS = 30
"""If a stored object disappears and no watch has delivered the deletion, its charge stays for this many seconds. This
is the default grace period of Kubernetes. The ledger records longer grace periods."""

FULL = "@full@"
"""This text is in the keys of the terminating charges that fill the quota of a namespace. No uid and model has it."""

NO_MODEL = ""
"""The model of an empty charge, which records in ``pending`` the grace period of a pod whose claims are charged."""

MIN_TERMINATING_SECONDS = 5
"""A running pod that is deleted stays charged for at least this many seconds, even with a grace period of 0. kubelet
must first observe the deletion. It then gives each container one second to stop."""

WARN_FROM = 0.9
"""An admitted pod gets a warning if at least this fraction of the limit is used."""

NO_LIMIT = Limit(cores=0)
"""The limit of a model that the quota does not list: no cards."""


class Pending(msgspec.Struct, frozen=True):
    """The charge of a pod or claim that was admitted, but that the controller has not yet observed as stored."""

    model: str
    charge: Charge
    grace: int = 0
    """The grace period of the pod in seconds; 0 if the charge stays pending for longer than the grace period."""


class Terminating(msgspec.Struct, frozen=True):
    """The charge of a deleted pod or claim. Containers may still use the GPUs for ``seconds`` after the deletion."""

    model: str
    charge: Charge
    seconds: int


class Reservation(msgspec.Struct, frozen=True, rename="camel"):
    """The quota that one webhook replica holds in advance, to admit pods without a write for each pod."""

    charges: Mapping[str, Charge]
    """The reserved quota by model."""
    counter: int
    """A number that differs in each write of the replica. It shows the replica which of its writes was stored."""
    seconds: float = RESERVATION_SECONDS
    """The seconds for which the replica may use the reservation after the write."""


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace."""

    # Pods and claims are counted at different versions, because they come from different watches.
    committed: Mapping[str, Charge] = {}
    """The charges of the stored pods by model, counted at ``pod_resource_version``."""
    pod_resource_version: str = ""
    pending: Mapping[str, Pending] = {}
    """The charges of admitted pods and claims that no watch has delivered yet, by uid."""
    terminating: Mapping[str, Terminating] = {}
    """By key (for most pods, the uid): the charges of deleted pods and claims whose GPUs may still be in use."""
    config_version: str = ""
    """The version of the quota ConfigMap that was used for the counts."""
    claimed: Mapping[str, Charge] = {}
    """The charges of the stored ResourceClaims by model, counted at ``claim_resource_version``."""
    claim_resource_version: str = ""
    reserved: Mapping[str, Reservation] = {}
    """By webhook replica: the quota that the replica holds in advance, to admit pods without a write for each pod."""
    waiting: str = ""
    """A replica without free quota writes a new text here, so that the other replicas release their reservations."""
    graces: Mapping[str, int] = {}
    """By model, the longest grace period of the pods in ``committed``, in seconds, if above `UNSEEN_SECONDS`."""
    claim_grace: int = 0
    """The longest grace period of stored pods that use claims, in seconds; 0 if at most `UNSEEN_SECONDS`."""

    @property
    def lost(self) -> Reservation | None:
        """The entry in ``reserved`` that closes the ledger, as charges may be missing; None if the ledger is open."""
        return self.reserved.get(LOST)

    @property
    def is_empty(self) -> bool:
        return not (self.committed or self.pending or self.terminating or self.claimed or self.reserved)

    def usage(self, model: str) -> Usage:
        pending, terminating = (
            total(entry.charge for entry in entries.values() if entry.model == model)
            for entries in (self.pending, self.terminating)
        )
        reserved = self.reserved_of(model)
        stored = self.committed.get(model, Charge()) + self.claimed.get(model, Charge())
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def total_usage(self) -> Usage:
        """Return the usage of all models together, also of models that the quota does not list."""
        pending, terminating = (
            total(entry.charge for entry in entries.values()) for entries in (self.pending, self.terminating)
        )
        reserved = total(charge for each in self.reserved.values() for charge in each.charges.values())
        stored = total((*self.committed.values(), *self.claimed.values()))
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def usages(self) -> Mapping[str, Usage]:
        entries: Iterable[Pending | Terminating] = (*self.pending.values(), *self.terminating.values())
        reserved = itertools.chain.from_iterable(each.charges for each in self.reserved.values())
        models = {*self.committed, *self.claimed, *(entry.model for entry in entries), *reserved} - {NO_MODEL}
        return {model: self.usage(model) for model in sorted(models)}

    def reserved_of(self, model: str) -> Charge:
        return total(each.charges[model] for each in self.reserved.values() if model in each.charges)

    @property
    def longest_claim_grace(self) -> int:
        """The longest grace period of stored or pending pods that use claims, in seconds; 0 if it is not recorded."""
        # The ledger does not record whether a pending pod uses claims, so assume that every pending pod does.
        return max(self.claim_grace, *(each.grace for each in self.pending.values()), 0)


class Admitted(msgspec.Struct, frozen=True):
    """The charge is admitted, and ``ledger`` includes it. If the charge exceeds a limit that is not enforced,
    ``shortage`` is set."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None
    total_usage: Usage | None = None
    """The usage of all models together, with the charge; None if the quota does not limit it."""


class Rejected(msgspec.Struct, frozen=True):
    """The charge does not fit the limit, and the limit is enforced."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The charge is not decided, because the namespace has `MAX_PENDING` pending charges. The caller should retry."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Admitted | Rejected | TooManyPending:
    """Decide by one version of the ledger whether one more charge fits. ``uid``: the pod or claim that is charged.

    ``enforced``: False if the quota only warns or audits. A charge that does not fit is then admitted with a shortage.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    # The API server may call the webhook twice for a pod. A pod whose uid has a pending charge is not charged again.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    shortage = None
    if asked.model != NO_MODEL and (quota.total or not fits(limit, usage.used, asked.charge)):
        of_model = Shortage(asked.model, asked.charge, usage, limit)
        shortage = find_shortage(of_model, quota.total, ledger.total_usage)
        if shortage and enforced:
            return Rejected(shortage)
    # `MAX_PENDING` is checked after the limit, so that a pod over the limit is rejected even with many pending charges.
    if len(ledger.pending) >= MAX_PENDING:
        return TooManyPending()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = msgspec.structs.replace(usage, used=usage.used + asked.charge, pending=usage.pending + asked.charge)
    return Admitted(charged, usage, limit, shortage, charged.total_usage() if quota.total else None)


def is_nearly_full(used: Charge, limit: Limit) -> bool:
    """Return whether at least nine tenths of a limit of cores or memory are used."""
    cores_nearly = limit.cores is not None and used.cores >= limit.cores * WARN_FROM
    return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


def long_graces(graces: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the longest grace period of each model in seconds. ``graces``: pairs of model and seconds.

    Periods up to `UNSEEN_SECONDS` are left out, because that is the minimum for which deleted pods stay charged anyway.
    """
    longest: dict[str, int] = {}
    for model, seconds in graces:
        if seconds > longest.get(model, UNSEEN_SECONDS):
            longest[model] = seconds
    return longest


def long_grace(graces: Iterable[int]) -> int:
    """Return the longest grace period in seconds; 0 if no period exceeds `UNSEEN_SECONDS`."""
    return long_graces((NO_MODEL, seconds) for seconds in graces).get(NO_MODEL, 0)


def charges_by_model(charges: Iterable[tuple[str, Charge]]) -> Mapping[str, Charge]:
    """Return the sum of charges for each model. ``charges``: pairs of model and charge."""
    sums: dict[str, Charge] = {}
    for model, charge in charges:
        sums[model] = sums.get(model, Charge()) + charge
    return sums


def is_older(version: str, than: str) -> bool:
    """Return whether ``version`` is older than ``than``. Both are resourceVersions; an empty version is the oldest."""
    # resourceVersions are revisions of etcd, which only grow. KEP-5504 allows clients to compare them.
    return int(version or 0) < int(than or 0)


def is_counted_before(ledger: Ledger, version: str, config_version: str) -> bool:
    """Return whether the ledger was counted before ``version``, or with an older quota ConfigMap."""
    claims = ledger.claim_resource_version
    return (
        is_older(ledger.pod_resource_version, version)
        or is_older(ledger.config_version, config_version)
        or (claims != "" and is_older(claims, version))
    )


# A ledger's text must be short, because each batch of admissions writes the whole text. So the amounts of equal charges
# are written once, and a uid takes 22 characters of base64 instead of 36. 512 pending charges take less than 20 kB.
FORMAT = 2
"""The version of the encoding. A release rejects ledgers in any other format."""

UIDS_REMEMBERED = 8192
"""The most uids in each of two caches: of encoded uids, and of decoded uids. The caches save time, because each write
of a ledger encodes all its pending uids again."""

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# 64 digits are enough. The sum of a million pods, each with 15,000 containers of `MAX_UNITS` devices of `MAX_UNITS`
# cores, has 47 digits.
_FRACTION = re.compile(r"([0-9]{1,64})/([1-9][0-9]{0,23})", re.ASCII)
_PACKED = 22
_PADDING = "=="


# Versions are compared as numbers. Python raises ValueError for a text without digits, or with too many.
_Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{0,20}\Z")]


class _Group(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Several equal charges. ``uids``: their objects' uids, 22 characters each. ``others``: keys that are not UUIDs."""

    charge: Charge
    uids: str
    others: tuple[str, ...] = ()
    seconds: int = 0


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Grouped(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    format: int
    committed: Mapping[str, Charge]
    pod_resource_version: _Version
    pending: Mapping[str, tuple[_Group, ...]]
    terminating: Mapping[str, tuple[_Group, ...]] = {}
    config_version: _Version = ""
    claimed: Mapping[str, Charge] = {}
    claim_resource_version: _Version = ""
    reserved: Mapping[str, Reservation] = {}
    waiting: str = ""
    graces: Mapping[str, int] = {}
    claim_grace: int = 0


_HEAD = msgspec.json.Decoder(_Format)


def _write_cores(cores: object) -> int | str:
    """Encode an amount of cores that is not an int, for example ``100/7``."""
    if not isinstance(cores, Fraction):
        raise NotImplementedError(f"{type(cores)} in a ledger")
    return cores.numerator if cores.denominator == 1 else str(cores)


def _read_cores(_: type, written: object) -> int | Fraction:
    if type(written) is int:
        return written
    found = _FRACTION.fullmatch(written) if isinstance(written, str) else None
    if not found or COMMON_DENOMINATOR % int(found[2]):
        raise ValueError(f"{written!r} is not an amount of cores")
    return Fraction(int(found[1]), int(found[2]))


_GROUPED = msgspec.json.Decoder(_Grouped, dec_hook=_read_cores)
_ENCODER = msgspec.json.Encoder(enc_hook=_write_cores)


class OtherFormat(ValueError):
    """Another release wrote the ledger, so it may contain data that this release does not support."""


def write_ledger(ledger: Ledger) -> str:
    pending = _grouped((uid, each.model, each.charge, each.grace) for uid, each in ledger.pending.items())
    terminating = _grouped((key, each.model, each.charge, each.seconds) for key, each in ledger.terminating.items())
    fields = {**msgspec.structs.asdict(ledger), "pending": pending, "terminating": terminating}
    document = _Grouped(format=FORMAT, **fields)
    return _ENCODER.encode(document).decode()


def read_ledger(text: str) -> Ledger:
    """Return the ledger in ``text``. Raises OtherFormat, or ValueError if the text is damaged."""
    # Check the format first, because the ledger of a later release may lack fields that are decoded below.
    if (found := _HEAD.decode(text).format) != FORMAT:
        raise OtherFormat(f"another release wrote the ledger in format {found}")
    grouped = _GROUPED.decode(text)
    pending = {uid: Pending(model, charge, grace) for uid, model, charge, grace in _entries(grouped.pending)}
    terminating = {
        key: Terminating(model, charge, seconds) for key, model, charge, seconds in _entries(grouped.terminating)
    }
    fields = {**msgspec.structs.asdict(grouped), "pending": pending, "terminating": terminating}
    del fields["format"]
    return Ledger(**fields)


Entry = tuple[str, str, Charge, int]
"""The fields of a pending or terminating charge: its key, its model, its charge, and its ``grace`` or ``seconds``."""


def _grouped(entries: Iterable[Entry]) -> dict[str, tuple[_Group, ...]]:
    uids_of: dict[str, dict[tuple[Charge, int], list[str]]] = {}
    for uid, model, charge, seconds in entries:
        uids_of.setdefault(model, {}).setdefault((charge, seconds), []).append(uid)
    return {
        model: tuple(_group(charge, uids, seconds) for (charge, seconds), uids in alike.items())
        for model, alike in uids_of.items()
    }


def _group(charge: Charge, uids: list[str], seconds: int) -> _Group:
    packed = [_pack(uid) for uid in uids]
    others = tuple(uid for uid, text in zip(uids, packed, strict=True) if not text)
    return _Group(charge, "".join(packed), others, seconds)


def _entries(grouped: Mapping[str, tuple[_Group, ...]]) -> Iterator[Entry]:
    for model, groups in grouped.items():
        for group in groups:
            for uid in (*_unpack(group.uids), *group.others):
                yield uid, model, group.charge, group.seconds


@functools.lru_cache(maxsize=UIDS_REMEMBERED)
def _pack(uid: str) -> str:
    if not _UUID.fullmatch(uid):
        return ""
    raw = bytes.fromhex(uid.replace("-", ""))
    return base64.urlsafe_b64encode(raw).decode().removesuffix(_PADDING)


def _unpack(packed: str) -> Iterator[str]:
    if len(packed) % _PACKED:
        raise ValueError(f"the length of packed uids must be a multiple of {_PACKED}; got {len(packed)} characters")
    return (_unpack_one(packed[start : start + _PACKED]) for start in range(0, len(packed), _PACKED))


@functools.lru_cache(maxsize=UIDS_REMEMBERED)
def _unpack_one(text: str) -> str:
    try:
        digits = base64.b64decode(text + _PADDING, altchars=b"-_", validate=True).hex()
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not a packed uid: {error}") from error
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
