"""Reads the key ``gpu_models`` of the quota ConfigMap: for each GPU model, its products, card memory and device size.

For example::

    A100: [NVIDIA-A100-*GB]                                        # names of products, as in a node's label
    A100-shared: {products: [NVIDIA-A100-*-SHARED], cards: 0.25}   # one nvidia.com/gpu is a quarter of a card
    L40S: {memory: 46068Mi}                                        # the memory of one card
    A30: {mig: {slices: 4, memory: 4}}                             # the MIG slices of one card

A product is the value of a node's model label, or the ``productName`` of a DRA device. Comparisons of products ignore
letter case and a leading ``NVIDIA-``, and treat a space as ``-``. In an entry of ``gpu_models``, ``*`` stands for any
text and ``?`` for one character. A product that no entry matches is a model of the same name.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Annotated, NamedTuple

import pydantic
from pydantic_core import ErrorDetails, ValidationError

from vcuda.quota.document import check_text
from vcuda.quota.model import CORES_PER_CARD, MAX_SLICES
from vcuda.quota.values import (
    StrictModel,
    WrongValueError,
    brief,
    printable,
    raise_faults,
    read_cores,
    read_label_value,
    read_memory,
    sentence,
)
from vcuda.quota.yaml import KeyPath, Plain
from vcuda.requests.folding import VENDOR, fold
from vcuda.requests.mig import MigSlices
from vcuda.requests.resources import MAX_PRODUCT, CardModels, ProductRow

MAX_PRODUCTS = 32
"""The maximum number of products of a model. The CEL expression that limits a claim to the model lists all of them."""
MAX_ROWS = 256
"""The maximum number of models, and of the products of all models. Validation compares all pairs of products."""


def common_product(one: str, other: str) -> str | None:
    """Return a product name that both patterns match; None if no name matches both patterns."""

    @functools.cache
    def rest(at: int, by: int) -> str | None:
        left, right = one[at : at + 1], other[by : by + 1]
        if "*" in (left, right):
            # There are two cases: the `*` ends here, or it also stands for the next character of the other pattern.
            ended = rest(at + 1, by) if left == "*" else rest(at, by + 1)
            if ended is not None:
                return ended
            character, at, by = (right, at, by + 1) if left == "*" else (left, at + 1, by)
        elif left and right and (left == right or "?" in left + right):
            character, at, by = left if right == "?" else right, at + 1, by + 1
        else:
            return None if left or right else ""
        found = rest(at, by) if character else None
        return None if found is None else {"*": "", "?": "x"}.get(character, character) + found

    return rest(0, 0)


_PRODUCT = re.compile(rf"[ -~]{{1,{MAX_PRODUCT}}}")  # printable ASCII


def read_product(value: object) -> str:
    if not isinstance(value, str) or not _PRODUCT.fullmatch(value):
        raise WrongValueError(
            f"must be a product of at most {MAX_PRODUCT} printable ASCII characters, for example NVIDIA-A100-*GB, "
            f"where * stands for any text and ? for one character; got {brief(value)}"
        )
    if unknown := next((each for each in value if each in "[]{}\\"), None):
        raise WrongValueError(f"must not contain {unknown}; got {brief(value)}")
    if not any(map(str.isalnum, fold(value))):
        told = "must have a letter or digit after the vendor's name, so as not to match every product"
        raise WrongValueError(f"{told}; got {brief(value)}")
    return value


def read_cores_of_device(value: object) -> int:
    """Return the cores (hundredths of a card) of one device, read from ``cards`` in ``gpu_models``: from 1 to 100."""
    cores = read_cores(value)
    if not 0 < cores <= CORES_PER_CARD:
        raise WrongValueError(
            f"must be the part of a card that one nvidia.com/gpu is, above 0 and at most 1; got {brief(value)}"
        )
    return cores


def _read_products(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f"must be a list, for example [NVIDIA-A100-*GB]; got {brief(value)}")
    if len(value) > MAX_PRODUCTS:
        raise WrongValueError(f"must not have more than {MAX_PRODUCTS} products; got {len(value)}")
    return tuple(value)


def read_slices(value: object) -> int:
    if not isinstance(value, Decimal) or value not in range(1, MAX_SLICES + 1):
        raise WrongValueError(f"must be a whole number of slices from 1 to {MAX_SLICES}; got {brief(value)}")
    return int(value)


class _MigEntry(StrictModel):
    slices: Annotated[int, pydantic.PlainValidator(read_slices)]
    memory: Annotated[int, pydantic.PlainValidator(read_slices)]


class _ModelEntry(StrictModel):
    products: Annotated[
        tuple[Annotated[str, pydantic.PlainValidator(read_product)], ...], pydantic.BeforeValidator(_read_products)
    ] = ()
    cards: Annotated[int, pydantic.PlainValidator(read_cores_of_device)] = CORES_PER_CARD
    memory: Annotated[int, pydantic.PlainValidator(read_memory)] = 0
    mig: _MigEntry | None = None

    @property
    def row(self) -> ProductRow:
        mig = MigSlices(self.mig.slices, self.mig.memory) if self.mig else None
        return ProductRow(self.products, self.memory, mig, cores=self.cards)


_ENTRIES = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(read_label_value)], _ModelEntry])


def parse_models(text: str, limited: Iterable[str] = ()) -> CardModels:
    """Parse ``gpu_models``. ``limited``: the models for which the quota document sets limits. Raises QuotaFault."""
    return check_text(text, lambda tree: _read_models(tree, limited), _sentence)


def _read_models(tree: Plain, limited: Iterable[str]) -> CardModels:
    # A bare list of products is short for a mapping with the key `products`. The paths of faults in a bare list do not
    # contain this key.
    written = tree.items() if isinstance(tree, dict) else ()
    bare = {name for name, entry in written if isinstance(entry, list)}
    plain = {name: {"products": entry} if name in bare else entry for name, entry in written}
    try:
        entries = _ENTRIES.validate_python(plain if bare else tree)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise_faults((_in_text(details["loc"], bare), _sentence(details)) for details in found)
    rows = {name: entry.row for name, entry in entries.items()}
    raise_faults((_in_text(path, bare), why) for path, why in _overlaps(rows, limited))
    return CardModels(rows)


def _in_text(path: KeyPath, bare: set[str]) -> KeyPath:
    return (path[0], *path[2:]) if path[:1] and path[0] in bare and "products" in path[1:2] else path


class _Claimed(NamedTuple):
    """A product name, or a pattern of product names, that belongs to a GPU model."""

    path: KeyPath
    model: str
    name: str

    @property
    def pattern(self) -> str:
        return fold(self.name)

    def common(self, other: "_Claimed") -> str | None:
        """Return a product that both names, which may be patterns, match; None if there is none."""
        # Patterns are compared without the vendor's name. But a wildcard at the beginning of one pattern may stand for
        # this name.
        own, their, vendor = self.pattern, other.pattern, VENDOR.lower()
        pairs = ((own, their), (vendor + own, their), (own, vendor + their))
        return next((both for one, another in pairs if (both := _common(one, another)) is not None), None)


def _overlaps(rows: Mapping[str, ProductRow], limited: Iterable[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield a pair of path and message for each product in ``gpu_models`` that could belong to two models."""
    products = [
        _Claimed((model, "products", at), model, product)
        for model, row in rows.items()
        for at, product in enumerate(row.products)
    ]
    if len(rows) > MAX_ROWS or len(products) > MAX_ROWS:
        found = f"{len(rows)} models and {len(products)} products"
        yield (), f"must not have more than {MAX_ROWS} models or {MAX_ROWS} products; got {found}"
        return
    # A model that is named only in the quota document, not in ``gpu_models``, matches the product of the same name.
    of_row = CardModels(rows).model_of
    strangers = {fold(model): model for model in sorted(limited) if model not in rows and of_row(model) != model}
    names = {**strangers, **{fold(model): model for model in reversed([*rows])}}
    for model in rows:
        if (spelled := strangers.get(fold(model), names[fold(model)])) != model:
            why = "two models must not differ only in letter case or in a leading NVIDIA-"
            yield (model,), f"must be written as {spelled}, because {why}"
    alone = [_Claimed((name,), name, name) for name in names.values()]
    for number, own in enumerate(products):
        for other in (*alone, *products[:number]):
            if other.model != own.model and (both := own.common(other)) is not None:
                owner = "is itself a model" if other in alone else f"belongs to {other.model} by {brief(other.name)}"
                message = (
                    f"a product must belong to only one model: {brief(own.name)} also matches {printable(both)}, which "
                    f"{owner}. Make the pattern more specific, for example NVIDIA-A100-*GB"
                )
                yield own.path, message
                break
        if any((each.model, each.name) == (own.model, own.name) for each in products[:number]):
            yield own.path, "duplicate product; each product must be listed once"


def _common(one: str, other: str) -> str | None:
    # Most patterns differ before their first wildcard, so the slow search for a common product is rarely needed.
    for mine, theirs in zip(one, other, strict=False):
        if mine in "*?" or theirs in "*?":
            break
        if mine != theirs:
            return None
    return common_product(one, other)


def _sentence(details: ErrorDetails) -> str:
    if "mig" in details["loc"][1:]:
        return sentence(details, _MigEntry, "must be the slices of one card, for example {slices: 7, memory: 8}")
    example = "[NVIDIA-A100-*GB], or {products: […], cards: 0.25}" if details["loc"] else "A100: [NVIDIA-A100-*GB]"
    return sentence(details, _ModelEntry, f"must be the products of a model, for example {example}")
