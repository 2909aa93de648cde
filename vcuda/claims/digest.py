"""The digest of a claim's spec: the data that decide the claim's charge, in a few hundred bytes without CEL.

A spec may have 1.27 MB of CEL. The spec is parsed once, within bounds, when a claim or template is reviewed or
observed. Only the digest is kept. It depends on the spec alone, so it stays valid when the quota or the devices change.
"""

import functools
from collections.abc import Iterable, Iterator, Set
from typing import NamedTuple, NewType

import msgspec

from vcuda.claims.cel import Attributes, read_device_facts
from vcuda.claims.names import PRODUCT, PROFILE
from vcuda.claims.objects import ClaimSpec, DeviceClaim, DeviceEntry
from vcuda.claims.pin import MAX_SELECTORS, ClaimPin, looks_like_pin, read_claim_pin, write_pin
from vcuda.errors import Fault
from vcuda.k8s_types import Decoder, Quantity

MAX_REQUESTS, MAX_ALTERNATIVES, MAX_CONFIGS = 32, 8, 32
"""The API server's limits on the requests of a claim, the alternatives of a request, and the configs of a claim. Their
names in k8s.io/api `resource/v1` are DeviceRequestsMaxSize, FirstAvailableDeviceRequestMaxSize, DeviceConfigMaxSize."""

MAX_CLAIM_ENTRIES = 64
"""The most entries (``exactly``, or alternatives in ``firstAvailable``) in all requests of a claim. The limit bounds
the time to compute charges, because there is a charge for each entry and GPU model."""

MAX_ASKED_BYTES = 8 * 1024
"""The most bytes of a claim's digest (short form of its spec) without pins. 64 average requests take half of this."""

MAX_PIN_BYTES = 6 * 1024
"""The most bytes of all pins (selectors for one GPU model) in a claim's digest. Three of the longest pins fit, or
thirty pins of average length. Equal pins count once."""

MAX_EXPRESSION_LENGTH, MAX_EXPRESSIONS_LENGTH = 2048, 4096
"""The most characters of one CEL expression that is parsed, and of all parsed expressions of one claim. Expressions
beyond these limits are ignored. That is safe, because expressions can only narrow the devices. If no MIG profile is
read, the largest charge applies. If no products are read, no GPU model is excluded."""

_TOO_MANY = (
    f"must not have more than {MAX_REQUESTS} requests, {MAX_ALTERNATIVES} entries in one firstAvailable, "
    f"{MAX_SELECTORS} selectors in one entry, or {MAX_CONFIGS} entries in config"
)
_TOO_MANY_ENTRIES = (
    f"must not have more than {MAX_CLAIM_ENTRIES} entries of `exactly` and `firstAvailable` in all requests together. "
    "Use fewer requests, for example one request with a count"
)
_TOO_LARGE = (
    f"must not have more than {MAX_ASKED_BYTES} bytes of requests and config (selectors and parameters do not count). "
    "Use fewer requests, for example one request with a count"
)
_TOO_MANY_PINS = (
    f"must not have more than {MAX_PIN_BYTES} characters in all selectors that name products of a GPU model. "
    "Use fewer of these selectors"
)
PINS_TOO_LARGE = (
    f"the limit of {MAX_PIN_BYTES} characters for all selectors that name products of a GPU model, including the "
    "selectors that the webhook adds. Use fewer of these selectors, or fewer requests"
)

Fact = tuple[str, str, tuple[str, ...]]
"""The domain and the name of a device attribute, and the values that a claim's selectors allow for this attribute."""


class EntryDigest(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One entry of a device request in a claim: ``exactly``, or one of the alternatives in ``firstAvailable``."""

    alternative: int | None
    """The position of the entry in ``firstAvailable``; None for ``exactly``."""
    name: str = ""
    """The name of the entry in ``firstAvailable``; empty for ``exactly``."""
    device_class_name: str = ""
    selectors: int = 0
    """The number of the entry's selectors."""
    allocation_mode: str = ""
    count: int | None = None
    admin_access: bool = False
    capacities: tuple[tuple[str, Quantity], ...] = ()
    facts: tuple[int, ...] = ()
    """The products and MIG profiles that the entry's selectors require, as positions in `ClaimDigest.facts`."""

    @property
    def field(self) -> str:
        """The field path of this entry in its device request, for example ``firstAvailable[0]``."""
        return "exactly" if self.alternative is None else f"firstAvailable[{self.alternative}]"


class RequestDigest(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The short form of one device request of a claim."""

    name: str = ""
    entries: tuple[EntryDigest, ...] = ()


class ConfigDigest(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One entry of ``config`` in a claim, without the parameters in the entry."""

    driver: str = ""
    """The DRA driver that gets the parameters; empty if the ``config`` entry names no driver."""
    requests: tuple[str, ...] = ()
    """The names of the device requests to which the parameters apply; empty if they apply to all requests."""


class EntryRead(NamedTuple):
    """One entry of a claim's digest: the position of its request, its pins (selectors for one GPU model), and the
    attribute values that its other selectors require."""

    request: int
    entry: EntryDigest
    pins: tuple[ClaimPin, ...]
    attributes: Attributes


class ClaimDigest(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The data in a claim's spec that decide the claim's charge. If the spec is too large, only ``fault`` is set."""

    requests: tuple[RequestDigest, ...] = ()
    config: tuple[ConfigDigest, ...] = ()
    facts: tuple[Fact, ...] = ()
    """The attribute values that the selectors of any entry require, each listed once."""
    pins: tuple[ClaimPin, ...] = ()
    """All different pins of the entries. A pin is a selector that limits an entry to products of one GPU model."""
    pinned: tuple[tuple[int, ...], ...] = ()
    """For each entry of all device requests, in order: the positions of the entry's pins in ``pins``."""
    pin_bytes: int = 0
    """The characters in the different selectors that begin like pins, plus 1 for each pin of each entry."""
    fault: str = ""

    def entries(self) -> Iterator[EntryRead]:
        flat = ((index, entry) for index, request in enumerate(self.requests) for entry in request.entries)
        for (index, entry), positions in zip(flat, self.pinned, strict=True):
            facts = (self.facts[at] for at in entry.facts)
            attributes = {(domain, attribute): frozenset(texts) for domain, attribute, texts in facts}
            yield EntryRead(index, entry, tuple(self.pins[at] for at in positions), attributes)

    def has_room(self, added: Set[ClaimPin], entries: int) -> bool:
        """Return whether all pins fit `MAX_PIN_BYTES` after each of ``entries`` entries gets one of ``added``."""
        # The pins (selectors for one GPU model) change nothing else in the digest. So no other limit can be exceeded.
        size = sum(_size_of(pin) for pin in added - {*self.pins}) + entries
        return self.pin_bytes + size <= MAX_PIN_BYTES

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (Fault("spec.devices", self.fault),) if self.fault else ()


@functools.lru_cache(maxsize=4096)  # a review of a claim needs the size of one pin for each GPU model
def _size_of(pin: ClaimPin) -> int:
    return len(write_pin(pin))


PackedDigest = NewType("PackedDigest", bytes)
"""A claim's digest as bytes, so that caches can count its size. Claims with equal requests have equal bytes."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ClaimDigest)
_SPEC = Decoder(ClaimSpec)


def pack(digest: ClaimDigest) -> PackedDigest:
    return PackedDigest(_ENCODER.encode(digest))


def unpack(packed: PackedDigest) -> ClaimDigest:
    return _DECODER.decode(packed)


def read_spec(raw: bytes | msgspec.Raw) -> ClaimDigest:
    """Return the digest of ``raw``, a claim's spec in JSON. Raises one of ``k8s_types.UNDECODABLE`` if malformed."""
    return digest_of(_SPEC.decode(raw))


def digest_of(spec: ClaimSpec) -> ClaimDigest:
    devices = spec.devices
    if _has_too_many(devices):
        return ClaimDigest(fault=_TOO_MANY)
    expressions = _Expressions()
    requests: list[RequestDigest] = []
    pinned: list[tuple[int, ...]] = []
    for request in devices.requests or ():
        entries = []
        for alternative, entry in request.entries():
            pins, stated = expressions.read(entry.expressions)
            pinned.append(pins)
            entries.append(_entry(alternative, entry, stated))
        requests.append(RequestDigest(request.name, tuple(entries)))
    config = tuple(
        ConfigDigest(
            each.opaque.driver if each.opaque else "",
            # A config can name an entry of firstAvailable as REQUEST/ENTRY. The digest keeps only REQUEST.
            tuple(dict.fromkeys(name.partition("/")[0] for name in each.requests or ())),
        )
        for each in devices.config or ()
    )
    if len(pinned) > MAX_CLAIM_ENTRIES:
        return ClaimDigest(fault=_TOO_MANY_ENTRIES)
    facts = tuple(expressions.facts)
    if len(_ENCODER.encode((requests, config, facts))) > MAX_ASKED_BYTES:
        return ClaimDigest(fault=_TOO_LARGE)
    pin_bytes = expressions.pin_bytes + sum(map(len, pinned))
    if pin_bytes > MAX_PIN_BYTES:
        return ClaimDigest(fault=_TOO_MANY_PINS)
    return ClaimDigest(tuple(requests), config, facts, tuple(expressions.pins), tuple(pinned), pin_bytes)


def _has_too_many(devices: DeviceClaim) -> bool:
    # Check the API server's limits here too, because the API server applies them only after the mutating webhooks.
    requests, config = devices.requests or (), devices.config or ()
    if len(requests) > MAX_REQUESTS or len(config) > MAX_CONFIGS:
        return True
    if any(len(request.first_available or ()) > MAX_ALTERNATIVES for request in requests):
        return True
    return any(len(entry.selectors or ()) > MAX_SELECTORS for request in requests for _, entry in request.entries())


def _entry(alternative: int | None, entry: DeviceEntry, facts: tuple[int, ...]) -> EntryDigest:
    capacities = (entry.capacity.requests if entry.capacity else None) or {}
    return EntryDigest(
        alternative,
        entry.name,
        entry.device_class_name,
        len(entry.selectors or ()),
        entry.allocation_mode,
        entry.count,
        bool(entry.admin_access),
        tuple(capacities.items()),
        facts,
    )


class _Expressions:
    """Parses the CEL expressions of one claim, up to `MAX_EXPRESSIONS_LENGTH`. Equal expressions are parsed once."""

    def __init__(self) -> None:
        self.pins: dict[ClaimPin, int] = {}
        self.pin_bytes = 0
        self.facts: dict[Fact, int] = {}
        self._positions: dict[str, int | None] = {}
        self._attributes: dict[str, Attributes] = {}
        self._left = MAX_EXPRESSIONS_LENGTH

    def read(self, expressions: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positions of an entry's pins in `pins`, and of its required attribute values in `facts`."""
        pins: dict[int, None] = {}
        attributes: dict[tuple[str, str], frozenset[str]] = {}
        for expression in expressions:
            position = self._position(expression) if looks_like_pin(expression) else None
            if position is not None:
                pins[position] = None
                continue
            for key, texts in self._read_attributes(expression).items():
                attributes[key] = texts & attributes.get(key, texts)
        facts = ((*key, tuple(sorted(texts))) for key, texts in attributes.items() if key[1] in (PRODUCT, PROFILE))
        return tuple(pins), tuple(self.facts.setdefault(fact, len(self.facts)) for fact in facts)

    def _position(self, expression: str) -> int | None:
        if expression not in self._positions:
            self.pin_bytes += len(expression)
            pin = read_claim_pin(expression) if self.pin_bytes <= MAX_PIN_BYTES else None
            self._positions[expression] = None if pin is None else self.pins.setdefault(pin, len(self.pins))
        return self._positions[expression]

    def _read_attributes(self, expression: str) -> Attributes:
        if expression not in self._attributes:
            if len(expression) > min(MAX_EXPRESSION_LENGTH, self._left):
                return {}
            self._left -= len(expression)
            self._attributes[expression] = read_device_facts([expression]).attributes
        return self._attributes[expression]
