"""The ledger of one namespace: what is charged to its quota, the decision on one more charge, its text, its report.

A pod that can be stored is always in ``committed`` or in ``pending`` of the version that was decided against. The
writer holds that version by compare-and-swap, so whatever runs beside it can only make the ledger count too much.
"""

import base64
import binascii
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.placement.placement import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, NamespaceQuota, Shortage, Usage, fits, total

MOST_PENDING = 512
"""Pending charges a namespace may have at once, so that a runaway owner cannot grow its ledger without end."""

WARN_FROM = 0.9
"""The part of a limit in use from which on admitted pods carry a warning."""

NO_LIMIT = Limit(cores=0)
"""What a model that is not listed is held to."""


class Pending(msgspec.Struct, frozen=True):
    """A charge whose pod has not yet been seen stored."""

    model: str
    charge: Charge


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace.

    ``committed`` holds per model what stored pods take, counted at ``pod_resource_version``; ``pending`` holds by pod
    uid what was admitted since.
    """

    committed: Mapping[str, Charge] = {}
    pod_resource_version: str = ""
    pending: Mapping[str, Pending] = {}

    def usage(self, model: str) -> Usage:
        """Return what is charged to one model."""
        pending = total(entry.charge for entry in self.pending.values() if entry.model == model)
        return Usage(used=self.committed.get(model, Charge()) + pending, pending=pending)

    def usages(self) -> Mapping[str, Usage]:
        """Return what is charged to every model that has a charge."""
        models = self.committed.keys() | {entry.model for entry in self.pending.values()}
        return {model: self.usage(model) for model in sorted(models)}


class Admitted(msgspec.Struct, frozen=True):
    """The charge is in ``ledger``. ``shortage`` says by how much it is over a limit that only warns."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None

    @property
    def nearly_full(self) -> bool:
        """Whether the model's cores or memory are used to nine tenths of the limit or more."""
        used, limit = self.usage.used, self.limit
        cores_nearly = used.cores >= limit.cores * WARN_FROM
        return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


class Refused(msgspec.Struct, frozen=True):
    """The charge does not fit."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The namespace has as many pending charges as it may; the caller comes again."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Admitted | Refused | TooManyPending:
    """Decide one charge against one version of the ledger.

    Where the quota is not ``enforced``, what does not fit is charged all the same.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    # The API server repeats calls; a pod that is charged already is not charged twice, and not refused either.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    shortage = None
    if not fits(limit, usage.used, asked.charge):
        shortage = Shortage(asked.model, asked.charge, usage, limit)
        if enforced:
            return Refused(shortage)
    # After the refusal: a namespace at its limit is told so, however many charges are pending.
    if len(ledger.pending) >= MOST_PENDING:
        return TooManyPending()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = Usage(usage.used + asked.charge, usage.pending + asked.charge)
    return Admitted(charged, usage, limit, shortage)


def charges_by_model(charges: Iterable[tuple[str, Charge]]) -> Mapping[str, Charge]:
    """Return the sum of the charges of each model, given as (model, charge)."""
    sums: dict[str, Charge] = {}
    for model, charge in charges:
        sums[model] = sums.get(model, Charge()) + charge
    return sums


class ObservedPods(msgspec.Struct, frozen=True):
    """What a controller has seen of one namespace's pods, up to ``resource_version``.

    ``committed`` is what those stored then take, by model. ``seen`` are the uids of all that were stored at some time:
    those there now, and those that have gone since.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]


def settle(ledger: Ledger, observed: ObservedPods, absent: Collection[str] = (), counted_since: str = "") -> Ledger:
    """Return the ledger recounted from what was observed, without the pending charges whose pods were seen stored.

    It is the same ledger where nothing differs, unless it was counted before ``counted_since``. ``absent`` are the
    uids that are proven never to have been stored: past every timeout of the API server, and then looked for by a
    quorum read. They go in any case.
    """
    # A leader that has been asleep, or that lists from a cache, would lower `committed` with an older count.
    if is_older(observed.resource_version, ledger.pod_resource_version):
        return _without(ledger, ledger.pending.keys() & {*absent})
    recounted = _without(ledger, ledger.pending.keys() & {*observed.seen, *absent})
    same = recounted is ledger and observed.committed == ledger.committed
    if same and not is_older(ledger.pod_resource_version, counted_since):
        return ledger
    return Ledger(observed.committed, observed.resource_version, recounted.pending)


def _without(ledger: Ledger, uids: Collection[str]) -> Ledger:
    if not uids:
        return ledger
    kept = {uid: entry for uid, entry in ledger.pending.items() if uid not in uids}
    return msgspec.structs.replace(ledger, pending=kept)


def is_older(version: str, than: str) -> bool:
    """Return whether one resourceVersion of pods is older than another; the empty one is the oldest."""
    # They are etcd's revisions, which only grow; KEP-5504 lets clients compare them.
    return int(version or 0) < int(than or 0)


# The text is small, since each batch of admissions writes it whole: pending charges that are alike share their amounts,
# and a uid is 22 characters of base64 instead of 36. 512 pending charges are under 20 kB.
FORMAT = 1

UIDS_REMEMBERED = 8192
"""A pending uid is written again with every batch until it is settled; its two spellings are worked out once."""

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PACKED = 22
_PADDING = "=="


class _Group(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Pending charges that are alike. ``others`` are uids that are no UUIDs; the API server makes none."""

    cores: int
    memory: int
    card_memory: int
    uids: str
    others: tuple[str, ...] = ()


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Grouped(msgspec.Struct, frozen=True, rename="camel"):
    committed: Mapping[str, Charge]
    pod_resource_version: str
    pending: Mapping[str, tuple[_Group, ...]]
    format: int = FORMAT


_HEAD = msgspec.json.Decoder(_Format)
_GROUPED = msgspec.json.Decoder(_Grouped)
_ENCODER = msgspec.json.Encoder()


def write_ledger(ledger: Ledger) -> str:
    """Return the ledger as text."""
    document = _Grouped(ledger.committed, ledger.pod_resource_version, _grouped(ledger.pending))
    return _ENCODER.encode(document).decode()


def read_ledger(text: str) -> Ledger:
    """Return the ledger that a text holds.

    Raises ValueError, as msgspec does too, where it is damaged or of another format.
    """
    # The format is read by itself first, since one of a later release may lack what is asked for below.
    if (found := _HEAD.decode(text).format) != FORMAT:
        raise ValueError(f"format {found} is of another release")
    grouped = _GROUPED.decode(text)
    return Ledger(grouped.committed, grouped.pod_resource_version, dict(_entries(grouped.pending)))


def _grouped(pending: Mapping[str, Pending]) -> dict[str, tuple[_Group, ...]]:
    uids_of: dict[str, dict[Charge, list[str]]] = {}
    for uid, entry in pending.items():
        uids_of.setdefault(entry.model, {}).setdefault(entry.charge, []).append(uid)
    return {
        model: tuple(_group(charge, uids) for charge, uids in by_charge.items()) for model, by_charge in uids_of.items()
    }


def _group(charge: Charge, uids: list[str]) -> _Group:
    packed = [_pack(uid) for uid in uids]
    others = tuple(uid for uid, text in zip(uids, packed, strict=True) if not text)
    return _Group(charge.cores, charge.memory, charge.card_memory, "".join(packed), others)


def _entries(pending: Mapping[str, tuple[_Group, ...]]) -> Iterator[tuple[str, Pending]]:
    for model, groups in pending.items():
        for group in groups:
            entry = Pending(model, Charge(group.cores, group.memory, group.card_memory))
            for uid in (*_unpack(group.uids), *group.others):
                yield uid, entry


@functools.lru_cache(maxsize=UIDS_REMEMBERED)
def _pack(uid: str) -> str:
    if not _UUID.fullmatch(uid):
        return ""
    raw = bytes.fromhex(uid.replace("-", ""))
    return base64.urlsafe_b64encode(raw).decode().removesuffix(_PADDING)


def _unpack(packed: str) -> Iterator[str]:
    if len(packed) % _PACKED:
        raise ValueError(f"a text of packed uids has {len(packed)} characters, which are no multiple of {_PACKED}")
    return (_unpack_one(packed[start : start + _PACKED]) for start in range(0, len(packed), _PACKED))


@functools.lru_cache(maxsize=UIDS_REMEMBERED)
def _unpack_one(text: str) -> str:
    try:
        digits = base64.b64decode(text + _PADDING, altchars=b"-_", validate=True).hex()
    except binascii.Error as error:
        raise ValueError(f"{text!r} is no packed uid: {error}") from error
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


MOST_PODS = 100
"""Pods named per model, the largest, and of those of no model: a published report stays small."""


class PodUse(msgspec.Struct, frozen=True):
    """One pod that holds cards: cores in hundredths of a card, memory in MiB."""

    name: str
    cores: int
    memory: int


class ModelUse(msgspec.Struct, frozen=True):
    """One model in one namespace. Cards are numbers such as 2.5; memory is in MiB, and None where it is not limited.

    ``used`` holds ``pending``: what was admitted and not yet seen stored. ``available`` is never below 0.
    """

    model: str
    limit: float
    used: float
    pending: float
    available: float
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0


class NamespaceUse(msgspec.Struct, frozen=True):
    """A namespace's report. ``unpinned`` names pods that hold no model by their spec and run on no known one.

    ``more_unpinned`` counts those that a `shortened` report leaves out.
    """

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    more_unpinned: int = 0

    def shortened(self) -> "NamespaceUse":
        """Return the report as it is published: with few names."""
        more = max(len(self.unpinned) - MOST_PODS, 0)
        return msgspec.structs.replace(self, unpinned=self.unpinned[:MOST_PODS], more_unpinned=more)


def report(
    namespace: str, quota: NamespaceQuota, ledger: Ledger, pods: Iterable[StoredPod], nodes: Nodes
) -> NamespaceUse:
    """Return the report of one namespace: every model of its quota, then others that it uses all the same."""
    holders: dict[str, list[StoredPod]] = {}
    unpinned = []
    for pod in pods:
        model = pod.model_on(nodes)
        if pod.live and model:
            holders.setdefault(model, []).append(pod)
        elif pod.live:
            unpinned.append(pod.name)
    usages = ledger.usages()
    models = dict.fromkeys([*quota.limits, *usages])
    used = tuple(_model(model, quota, usages, holders.get(model, [])) for model in models)
    return NamespaceUse(namespace, quota.mode.value, used, tuple(sorted(unpinned)))


def _model(model: str, quota: NamespaceQuota, usages: Mapping[str, Usage], holders: list[StoredPod]) -> ModelUse:
    limit = quota.limits.get(model, NO_LIMIT)
    usage = usages.get(model, Usage())
    largest = sorted(holders, key=lambda pod: (-pod.charge.cores, -pod.charge.memory, pod.name))
    return ModelUse(
        model=model,
        limit=limit.cores / CORES_PER_CARD,
        used=usage.used.cores / CORES_PER_CARD,
        pending=usage.pending.cores / CORES_PER_CARD,
        available=max(limit.cores - usage.used.cores, 0) / CORES_PER_CARD,
        memory_limit=limit.memory,
        memory_used=None if limit.memory is None else usage.used.memory_under(limit),
        pods=tuple(PodUse(pod.name, pod.charge.cores, pod.charge.memory_under(limit)) for pod in largest[:MOST_PODS]),
        more_pods=max(len(largest) - MOST_PODS, 0),
    )
