"""Finds the GPU model of a product. A space in a name equals ``-``, and letter case does not matter."""

import functools
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.requests.folding import fold
from vcuda.requests.resources import WILDCARDS, CardModels, matcher

Rows = Mapping[str, tuple[str, ...]]
"""The patterns of products, by model."""


class ModelProducts(msgspec.Struct, frozen=True):
    """The products of one model."""

    patterns: tuple[str, ...]
    """The name of the model, the products of its row, and other products that were seen on its nodes."""
    foreign: str | None
    """A product that the patterns match, but that may belong to another model; None if there is none."""


class Products(msgspec.Struct, frozen=True, dict=True):
    """The products of each model, all folded. A product that belongs to several models is assigned to none."""

    names: Mapping[str, frozenset[str]]
    """The models by their folded name."""
    rows: Rows
    """The patterns in the rows of the quota, by model."""
    seen: Mapping[str, frozenset[str]]
    """The models of the nodes on which a product was seen, by product."""

    @classmethod
    def of(
        cls, models: Iterable[str], named: CardModels, devices: Devices, model_of_node: Callable[[str], str | None]
    ) -> "Products":
        """Return the products of these models, by the rows of the quota and by the devices on nodes of each model."""
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

    # The next two are stored, because every claim needs them. They change only with the quota and the devices.
    @functools.cached_property
    def _matchers(self) -> Mapping[str, Callable[[str], object]]:
        return {model: matcher(patterns) for model, patterns in self.rows.items()}

    @functools.cached_property
    def _known(self) -> dict[str, ModelProducts]:
        return {}

    def model_of(self, product: str) -> str | None:
        """Return the model of a product; None if it has no model, or more than one."""
        folded = fold(product)
        if folded in self.names:
            return _only(self.names[folded])
        listed = frozenset(model for model, matches in self._matchers.items() if matches(folded))
        return _only(listed or self.seen.get(folded, frozenset()))

    def model_of_pattern(self, pattern: str) -> str | None:
        """Return the one model to which all products that match a pattern belong; None if this is not certain."""
        if not WILDCARDS.intersection(pattern):
            return self.model_of(pattern)
        return _only(frozenset(model for model, patterns in self.rows.items() if pattern in patterns))

    def patterns_of(self, model: str) -> tuple[str, ...]:
        return self._products_of(model).patterns

    def foreign(self, model: str) -> str | None:
        return self._products_of(model).foreign

    def _products_of(self, model: str) -> ModelProducts:
        if model not in self._known:
            # The name of the model comes first. It identifies the model even while no node has its products.
            own = tuple(dict.fromkeys((fold(model), *self.rows.get(model, ()))))
            matches = matcher(own)
            more = (each for each in sorted(self.seen) if not matches(each) and self.model_of(each) == model)
            patterns = (*own, *(each for each in more if each.isprintable() and not WILDCARDS.intersection(each)))
            matches = matcher(patterns)
            known = sorted({*self.seen, *self.names})
            foreign = next((each for each in known if matches(each) and self.model_of(each) != model), None)
            self._known[model] = ModelProducts(patterns, foreign)
        return self._known[model]

    def among(self, patterns: Iterable[str]) -> Callable[[str], object]:
        """Return a function that returns a true value if a product matches one of ``patterns``."""
        matches = matcher(patterns)
        return lambda product: matches(fold(product))


def _only(models: frozenset[str]) -> str | None:
    return next(iter(models)) if len(models) == 1 else None
