"""Which GPU model a product is, by the name that its driver gives it; a space equals ``-``, case does not matter."""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.claims.devices import Devices
from vcuda.requests.resources import WILDCARDS, CardModels, fold, matcher

Rows = Mapping[str, tuple[str, ...]]
"""By model, the patterns of its products."""


class Products(msgspec.Struct, frozen=True):
    """The products of each model, all folded.

    ``names`` are models by their folded name, ``rows`` the patterns of the quota's table, and ``seen`` the models of
    the nodes on which a product was seen. Where more than one model is found, it is none.
    """

    names: Mapping[str, frozenset[str]]
    rows: Rows
    seen: Mapping[str, frozenset[str]]

    @classmethod
    def of(
        cls, models: Iterable[str], named: CardModels, devices: Devices, model_of_node: Callable[[str], str | None]
    ) -> "Products":
        """Return the products of these models, as the rows and the devices on nodes of a model tell."""
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

    def model_of(self, product: str) -> str | None:
        """Return the one model that a product is of, or None."""
        folded = fold(product)
        return _only(self.names.get(folded) or self._listed(folded) or self.seen.get(folded, frozenset()))

    def _listed(self, folded: str) -> frozenset[str]:
        return frozenset(model for model, patterns in self.rows.items() if matcher(patterns)(folded))

    def model_of_pattern(self, pattern: str) -> str | None:
        """Return the one model whose products a pattern certainly stands for, or None."""
        if not WILDCARDS.intersection(pattern):
            return self.model_of(pattern)
        return _only(frozenset(model for model, patterns in self.rows.items() if pattern in patterns))

    def patterns_of(self, model: str) -> tuple[str, ...]:
        """Return the patterns of a model's products: its own name, its row, and what was seen beside these."""
        # Its name is always the first: it still tells the model when the nodes with its products are away.
        known = tuple(dict.fromkeys((fold(model), *self.rows.get(model, ()))))
        matches = matcher(known)
        own = (product for product in sorted(self.seen) if not matches(product) and self.model_of(product) == model)
        return (*known, *(product for product in own if product.isprintable() and not WILDCARDS.intersection(product)))

    def foreign(self, model: str) -> str | None:
        """Return a product that the patterns of this model let in though it is not certainly of it; None: none is."""
        matches = matcher(self.patterns_of(model))
        known = sorted({*self.seen, *self.names})
        return next((each for each in known if matches(each) and self.model_of(each) != model), None)

    def among(self, patterns: Iterable[str]) -> Callable[[str], object]:
        """Return what tells whether a product, as its driver writes it, is one of these patterns."""
        matches = matcher(patterns)
        return lambda product: matches(fold(product))


def _only(models: frozenset[str]) -> str | None:
    return next(iter(models)) if len(models) == 1 else None
