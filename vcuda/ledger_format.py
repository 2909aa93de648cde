"""How a ledger is written: JSON that stays small however much is pending, since its size is paid at each write.

Pending charges stand by model and by what they take, in hundredths of a card, MiB, and hundredths of a card's memory;
the uids of one such group are one text, 22 characters each (16 bytes in URL-safe Base64)::

    {"format": 2, "committed": {"M40": {"cores": 300}}, "podResourceVersion": "71",
     "pending": {"M40": [[100, 0, 100, "0vJ8kXr6Q2-…"]]}}

Format 1, of the first builds, had one entry a uid; it is read, and replaced by the next write.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Iterator, Mapping

import msgspec

from vcuda.charge import Charge
from vcuda.ledger import Ledger, Pending

FORMAT = 2

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


class _Head(msgspec.Struct, frozen=True):
    format: int = 1


class _Grouped(msgspec.Struct, frozen=True, rename="camel"):
    committed: Mapping[str, Charge]
    pod_resource_version: str
    pending: Mapping[str, tuple[_Group, ...]]
    format: int = FORMAT


class _Entry(msgspec.Struct, frozen=True):
    model: str
    charge: Charge


class _ByUid(msgspec.Struct, frozen=True, rename="camel"):
    committed: Mapping[str, Charge]
    pod_resource_version: str
    pending: Mapping[str, _Entry]


_HEAD = msgspec.json.Decoder(_Head)
_GROUPED = msgspec.json.Decoder(_Grouped)
_BY_UID = msgspec.json.Decoder(_ByUid)
_ENCODER = msgspec.json.Encoder()


def write_ledger(ledger: Ledger) -> str:
    """Return the ledger as text."""
    document = _Grouped(ledger.committed, ledger.pod_resource_version, _grouped(ledger.pending))
    return _ENCODER.encode(document).decode()


def read_ledger(text: str) -> Ledger:
    """Return the ledger that a text holds, of this format or an earlier one.

    Raises:
        ValueError: it is damaged, or of a later format. What msgspec raises is one too.

    """
    format_ = _HEAD.decode(text).format
    if format_ == FORMAT:
        grouped = _GROUPED.decode(text)
        return Ledger(grouped.committed, grouped.pod_resource_version, dict(_entries(grouped.pending)))
    if format_ == 1:
        old = _BY_UID.decode(text)
        pending = {uid: Pending(entry.model, entry.charge) for uid, entry in old.pending.items()}
        return Ledger(old.committed, old.pod_resource_version, pending)
    raise ValueError(f"format {format_} is of a later release")


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
    """Return a uid as it is written, or nothing where it is no UUID."""
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
