"""The cards that a node has by its device plugin's account: annotations of nodes, by HAMi and vgpu-manager.

HAMi from 2.8 on and vgpu-manager write a JSON list. HAMi before that writes
``uuid,count,memory,cores,type,numa,health`` for each card, its later releases ``,index,mode`` besides, with a colon
after each (HAMi ``pkg/device/devices.go``).
"""

import sys
from collections.abc import Callable, Iterator, Mapping

import msgspec

from vcuda.k8s_types import UNDECODABLE
from vcuda.requests.schemes import SCHEMES

MAX_CARDS = 1024
"""Cards that one node may register; more is a mistake."""
MAX_TYPES = 16
"""Types of card on one node: what is registered is written on pods."""
MAX_TEXT = 128
"""Characters in a card's type or uuid: NVML's own bound is 96."""

_MIG = "mig"
_FIELDS = (7, 9)


class Card(msgspec.Struct, frozen=True, gc=False):
    """One card: its uuid, its type in its driver's words, and whether it is handed out in MIG slices."""

    uuid: str
    type: str
    mig: bool = False


class Register(msgspec.Struct, frozen=True, gc=False):
    """The cards of one node as one device plugin has them, and their types, each once.

    ``sliced``: a card is in MIG mode; ``whole``: one is not. Kept, as all nodes are gone through at each change.
    """

    cards: tuple[Card, ...] = ()
    types: tuple[str, ...] = ()
    sliced: bool = False
    whole: bool = False

    @classmethod
    def of(cls, *cards: Card) -> "Register":
        """Return the register of these cards."""
        modes = {card.mig for card in cards}
        return cls(cards, tuple(sorted({card.type for card in cards})), True in modes, False in modes)

    def type_of(self, uuid: str) -> str | None:
        """Return the type of the card with this uuid; None where there is no such card."""
        return next((card.type for card in self.cards if card.uuid == uuid), None)


Registers = Mapping[str, Register]
"""What is registered on one node, by the name of the scheme whose device plugin it was."""

ANNOTATIONS = {scheme.register: scheme.name for scheme in SCHEMES if scheme.register}
"""The annotations of a node that hold a register, each with the name of its scheme."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    # HAMi's id is the uuid; vgpu-manager's is a number, with the uuid beside it.
    type: str
    id: str | int = ""
    uuid: str = ""
    mode: str = ""
    mig: bool = False


_decode = msgspec.json.Decoder(list[_Entry]).decode


def read_register(text: str) -> Register:
    """Return what is registered in an annotation; raise ValueError where that cannot be made out."""
    listed = text.lstrip().startswith("[")
    try:
        register = Register.of(*(_listed(text) if listed else _separated(text)))
    except UNDECODABLE as error:
        raise ValueError(str(error)) from error
    if len(register.cards) > MAX_CARDS or len(register.types) > MAX_TYPES:
        raise ValueError(f"{len(register.cards)} cards of {len(register.types)} types on one node")
    return register


def _listed(text: str) -> Iterator[Card]:
    for entry in _decode(text):
        uuid = entry.uuid or entry.id
        yield _card(uuid if isinstance(uuid, str) else "", entry.type, mig=entry.mig or entry.mode == _MIG)


def _separated(text: str) -> Iterator[Card]:
    for line in text.split(":"):
        if line.strip():
            fields = line.split(",")
            if len(fields) not in _FIELDS:
                raise ValueError(f"a card of {len(fields)} fields")
            yield _card(fields[0].strip(), fields[4], mig=fields[-1].strip() == _MIG)


def _card(uuid: str, kind: str, *, mig: bool) -> Card:
    # A type is written into a list that commas separate, and read back from there without blanks around it.
    kind = kind.strip()
    for name, value in (("uuid", uuid), ("type", kind)):
        plain = value.isascii() and value.isprintable() and "," not in value
        if not value or len(value) > MAX_TEXT or not plain:
            raise ValueError(f"a card with {value[:MAX_TEXT]!r} for its {name}")
    # Interned: thousands of nodes have a few types.
    return Card(uuid, sys.intern(kind), mig)


def read_registers(annotations: Mapping[str, str], on_fault: Callable[[str, ValueError], object]) -> Registers:
    """Return what is registered on a node; a malformed register is told to ``on_fault``, and counts for nothing."""
    found = {}
    for key, scheme in ANNOTATIONS.items():
        if key in annotations:
            try:
                found[scheme] = read_register(annotations[key])
            except ValueError as error:
                on_fault(key, error)
    return found
