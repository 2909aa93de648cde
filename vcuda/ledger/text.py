"""Writes ledgers as texts, and reads them. A ledger is stored as one text in a ConfigMap."""

import base64
import binascii
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Annotated

import msgspec

from vcuda.ledger.ledger import Allotment, Ledger, Pending, Reservation, Terminating
from vcuda.quota.model import COMMON_DENOMINATOR, Charge

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
Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{0,20}\Z")]


class _Group(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Several equal charges. ``uids``: their objects' uids, 22 characters each. ``other_keys``: keys of other forms."""

    charge: Charge
    uids: str
    other_keys: tuple[str, ...] = ()
    seconds: int = 0


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Grouped(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    format: int
    committed: Mapping[str, Charge]
    pod_resource_version: Version
    pending: Mapping[str, tuple[_Group, ...]]
    terminating: Mapping[str, tuple[_Group, ...]] = {}
    config_version: Version = ""
    claimed: Mapping[str, Charge] = {}
    claim_resource_version: Version = ""
    reserved: Mapping[str, Reservation] = {}
    waiting: str = ""
    graces: Mapping[str, int] = {}
    claim_grace: int = 0
    allotments: Mapping[str, Allotment] = {}
    team_version: Version = ""


_HEAD = msgspec.json.Decoder(_Format)


def encode_cores(cores: object) -> int | str:
    """Encode an amount of cores that is not an int, for example ``100/7``."""
    if not isinstance(cores, Fraction):
        raise NotImplementedError(f"{type(cores)} in a ledger")
    return cores.numerator if cores.denominator == 1 else str(cores)


def decode_cores(_: type, written: object) -> int | Fraction:
    if type(written) is int:
        return written
    found = _FRACTION.fullmatch(written) if isinstance(written, str) else None
    if not found or COMMON_DENOMINATOR % int(found[2]):
        raise ValueError(f"{written!r} is not an amount of cores")
    return Fraction(int(found[1]), int(found[2]))


_GROUPED = msgspec.json.Decoder(_Grouped, dec_hook=decode_cores)
ENCODER = msgspec.json.Encoder(enc_hook=encode_cores)


class OtherFormat(ValueError):
    """Another release wrote the ledger, so it may contain data that this release does not support."""


def write_ledger(ledger: Ledger) -> str:
    pending = _grouped((uid, each.model, each.charge, each.grace) for uid, each in ledger.pending.items())
    terminating = _grouped((key, each.model, each.charge, each.seconds) for key, each in ledger.terminating.items())
    fields = {**msgspec.structs.asdict(ledger), "pending": pending, "terminating": terminating}
    document = _Grouped(format=FORMAT, **fields)
    return ENCODER.encode(document).decode()


def read_ledger(text: str) -> Ledger:
    """Return the ledger in ``text``. Raises OtherFormat, or ValueError if the text is damaged."""
    check_format(text)
    grouped = _GROUPED.decode(text)
    pending = {uid: Pending(model, charge, grace) for uid, model, charge, grace in _entries(grouped.pending)}
    terminating = {
        key: Terminating(model, charge, seconds) for key, model, charge, seconds in _entries(grouped.terminating)
    }
    fields = {**msgspec.structs.asdict(grouped), "pending": pending, "terminating": terminating}
    del fields["format"]
    return Ledger(**fields)


def check_format(text: str) -> None:
    """Raise OtherFormat if another release wrote ``text``. Its ledger may lack fields that this release requires."""
    if (found := _HEAD.decode(text).format) != FORMAT:
        raise OtherFormat(f"another release wrote the ledger in format {found}")


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
    other_keys = tuple(uid for uid, text in zip(uids, packed, strict=True) if not text)
    return _Group(charge, "".join(packed), other_keys, seconds)


def _entries(grouped: Mapping[str, tuple[_Group, ...]]) -> Iterator[Entry]:
    for model, groups in grouped.items():
        for group in groups:
            for uid in (*_unpack(group.uids), *group.other_keys):
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
