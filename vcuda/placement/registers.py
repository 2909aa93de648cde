"""Parses registers: node annotations in which the device plugin of HAMi or vgpu-manager lists the GPU cards.

vgpu-manager and HAMi from 2.8 on write a JSON list. Older HAMi releases write
``uuid,count,memory,cores,type,numa,health`` and a colon for each card. The later ones of these releases add
``,index,mode`` before the colon (HAMi ``pkg/device/devices.go``).
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec

from vcuda.k8s_types import UNDECODABLE
from vcuda.requests.schemes import SCHEMES

MAX_CARDS = 1024
"""Maximum number of cards in the register of one node. A larger number is a mistake."""
MAX_TYPES = 16
"""Maximum number of card types in the register of one node. The types are written into annotations of pods."""
MAX_TEXT = 128
"""Maximum number of characters in the type or the uuid of a card. NVML allows 96."""
MAX_REGISTER = 256 * 1024
"""Maximum number of characters of a register. The API server allows 256 KiB for all annotations of an object."""
MAX_CARD_MEMORY = 2**24
"""Maximum memory of one card in MiB. Vendors may register a multiple of the real memory. Larger values are ignored."""

_MIG = "mig"
_FIELDS = (7, 9)
_DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)


class Card(msgspec.Struct, frozen=True, gc=False):
    """One card of a register. ``type``: the driver's product name. ``mig``: True if the card is in MIG mode."""

    uuid: str
    type: str
    mig: bool = False
    memory: int = 0
    """The registered memory in MiB, which may be a multiple of the real memory; 0 if no valid memory is registered."""
    healthy: bool = True
    """False if the register reports a fault of the card. HAMi's JSON omits the field for a faulty card, so such a card
    counts as healthy."""
    count: int = 0
    """The number of devices into which HAMi divides the card, and which its device plugin offers; 0 if unknown."""


Register = tuple[Card, ...]
"""The cards that one device plugin lists for a node."""

Registers = Mapping[str, Register]
"""The registers of one node, by the name of the vendor's scheme."""

ANNOTATIONS = {scheme.register: scheme.name for scheme in SCHEMES if scheme.register}
"""The annotation keys of the registers, each with the name of the vendor's scheme."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    # ``id`` is the card's uuid in HAMi's register. In vgpu-manager's register it is a number, and ``uuid`` is the uuid.
    type: str
    id: str | int = ""
    uuid: str = ""
    mode: str = ""
    mig: bool = False
    # HAMi and vgpu-manager use different fields for a card's memory and health. All fields from here on accept any
    # value, so that one wrong field does not make the whole register malformed.
    devmem: object = 0
    memory: object = 0
    count: object = 0
    health: object = None
    healthy: object = None


_decode = msgspec.json.Decoder(list[_Entry]).decode


def read_register(text: str) -> Register:
    """Return the register (list of cards) in a node annotation. Raises ValueError if it is malformed."""
    if len(text) > MAX_REGISTER:
        raise ValueError(f"a register must not be longer than {MAX_REGISTER} characters; got {len(text)}")
    listed = text.lstrip().startswith("[")
    try:
        register = tuple(_listed(text) if listed else _separated(text))
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error
    types = {card.type for card in register}
    if len(register) > MAX_CARDS or len(types) > MAX_TYPES:
        found = f"{len(register)} cards of {len(types)} types"
        raise ValueError(f"a register must have at most {MAX_CARDS} cards of {MAX_TYPES} types; got {found}")
    return register


def _listed(text: str) -> Iterator[Card]:
    for entry in _decode(text):
        uuid = entry.uuid or entry.id
        memory = entry.devmem or entry.memory
        uuid, faulty = uuid if isinstance(uuid, str) else "", entry.health is False or entry.healthy is False
        mig = entry.mig or entry.mode == _MIG
        yield _card(uuid, entry.type, memory, entry.count, mig=mig, healthy=not faulty)


def _separated(text: str) -> Iterator[Card]:
    for line in text.split(":"):
        if line.strip():
            fields = line.split(",")
            if len(fields) not in _FIELDS:
                raise ValueError(f"each card must have 7 or 9 fields; got {len(fields)}")
            count, memory = (int(each) if _DIGITS.fullmatch(each) else 0 for each in fields[1:3])
            mig, faulty = fields[-1].strip() == _MIG, fields[6].strip() == "false"
            yield _card(fields[0].strip(), fields[4], memory, count, mig=mig, healthy=not faulty)


def _card(uuid: str, kind: str, memory: object, count: object, *, mig: bool, healthy: bool) -> Card:
    # Pod annotations list card types, separated by commas. So a type with a comma is rejected. Vendors ignore the
    # blanks around a type.
    kind = kind.strip()
    for name, value in (("uuid", uuid), ("type", kind)):
        plain = value.isascii() and value.isprintable() and "," not in value
        if not value or len(value) > MAX_TEXT or not plain:
            allowed = f"1 to {MAX_TEXT} printable ASCII characters without commas"
            raise ValueError(f"the {name} of a card must have {allowed}; got {value[:MAX_TEXT]!r}")
    # The card's type is interned, because thousands of nodes have the same few types.
    known, parts = (
        figure if isinstance(figure, int) and 0 < figure <= MAX_CARD_MEMORY else 0 for figure in (memory, count)
    )
    return Card(uuid, sys.intern(kind), mig, known, healthy, parts)


def read_registers(annotations: Mapping[str, str], on_fault: Callable[[str, ValueError], object]) -> Registers:
    """Return the registers of a node. A malformed register is left out, and ``on_fault`` gets its key and the error."""
    found = {}
    for key, scheme in ANNOTATIONS.items():
        if key in annotations:
            try:
                found[scheme] = read_register(annotations[key])
            except ValueError as error:
                on_fault(key, error)
    return found
