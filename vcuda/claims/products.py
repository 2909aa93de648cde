"""Finds the GPU model of a product name.

Names are compared after `fold`, which removes the vendor's name and the differences of letter case. So all spellings of
a product have the same model.
"""

import functools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.requests.folding import fold
from vcuda.requests.resources import WILDCARDS, CardModels, product_matcher

Rows = Mapping[str, tuple[str, ...]]
"""Patterns of product names for each GPU model."""


class ModelProducts(msgspec.Struct, frozen=True):
    """The product names of one GPU model."""

    patterns: tuple[str, ...]
    """The model's name, its patterns in ``gpu_models``, and other product names of devices on the model's nodes."""
    foreign: str | None
    """A product name that matches ``patterns`` but may belong to another GPU model; None if there is none."""


class Products(msgspec.Struct, frozen=True, dict=True):
    """The product names of each GPU model. A product that matches several models has no model."""

    names: Mapping[str, frozenset[str]]
    """By the folded form of a model's name: all GPU models whose names have this form."""
    rows: Rows
    """The patterns that key ``gpu_models`` of the quota ConfigMap has for each model."""
    seen: Mapping[str, frozenset[str]]
    """By product, without the vendor's name (see `fold`): the models of all nodes with a device of this product."""

    @classmethod
    def of(
        cls, models: Iterable[str], named: CardModels, devices: Devices, model_of_node: Callable[[str], str | None]
    ) -> "Products":
        """Return the products of ``models``, according to ``gpu_models`` and to the devices on nodes of each model."""
        names: dict[str, frozenset[str]] = {}
        for model in {*models, *named.rows}:
            names[fold(model)] = names.get(fold(model), frozenset()) | {model}
        seen: dict[str, set[str]] = {}
        for offer, nodes in devices.offers.items():
            if offer.product:
                found = seen.setdefault(fold(offer.product), set())
                found.update(model for model in map(model_of_node, nodes) if model)
        rows = {model: tuple(dict.fromkeys(map(fold, row.products))) for model, row in named.rows.items()}
        return cls(names, rows, {product: frozenset(found) for product, found in seen.items()})

    # The functions that match products are cached, because each claim needs them. A `Products` never changes.
    @functools.cached_property
    def _matchers(self) -> Mapping[str, Callable[[str], object]]:
        return {model: product_matcher([patterns]) for model, patterns in self.rows.items()}

    def model_of(self, product: str) -> str | None:
        """Return the GPU model of a product; None if the product has no model, or could belong to several."""
        folded = fold(product)
        if folded in self.names:
            return _only(self.names[folded])
        listed = frozenset(model for model, matches in self._matchers.items() if matches(folded))
        return _only(listed or self.seen.get(folded, frozenset()))

    def model_of_pattern(self, pattern: str) -> str | None:
        """Return the GPU model of all products that match a pattern; None if it may be one of several models."""
        if not WILDCARDS.intersection(pattern):
            return self.model_of(pattern)
        return _only(frozenset(model for model, patterns in self.rows.items() if pattern in patterns))

    @functools.cached_property
    def of_model(self) -> Callable[[str], ModelProducts]:
        return functools.cache(self._of_model)

    def _of_model(self, model: str) -> ModelProducts:
        # The first pattern of a pin (a selector for one GPU model) is the model's name. So the pin identifies the
        # model even if no node has a matching product.
        own = tuple(dict.fromkeys((fold(model), *self.rows.get(model, ()))))
        matches = product_matcher([own])
        more = (each for each in sorted(self.seen) if not matches(each) and self.model_of(each) == model)
        patterns = (*own, *(each for each in more if each.isprintable() and not WILDCARDS.intersection(each)))
        matches = product_matcher([patterns])
        known = sorted({*self.seen, *self.names})
        foreign = next((each for each in known if matches(each) and self.model_of(each) != model), None)
        return ModelProducts(patterns, foreign)

    def among(self, patterns: Iterable[str]) -> Callable[[str], object]:
        """Return a function that tests whether a product's name matches one of ``patterns``."""
        matches = product_matcher([patterns])
        return lambda product: matches(fold(product))


def _only(models: frozenset[str]) -> str | None:
    return next(iter(models)) if len(models) == 1 else None
