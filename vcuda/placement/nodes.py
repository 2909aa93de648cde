"""The cluster's nodes: their models, labels and registers."""

import functools
import re
from collections.abc import Mapping, Set
from types import MappingProxyType

import msgspec

from vcuda.placement.affinity import Labels, NodeIndex, NodeLabels, Values
from vcuda.placement.card_types import CardTypes
from vcuda.placement.free_cards import FreeCardsByPool
from vcuda.placement.registers import Registers
from vcuda.requests.resources import NO_ROWS, CardModels, RegisteredCards, RegisteredMemory

COUNT_LABEL = "nvidia.com/gpu.count"
"""The label in which GPU feature discovery writes the number of a node's cards."""

_COUNT = re.compile(r"[0-9]{1,4}", re.ASCII)


class Nodes(msgspec.Struct, frozen=True, dict=True):
    """The cluster's nodes."""

    keys: NodeLabels = NodeLabels()
    labels: Mapping[str, Labels] = {}
    """The labels of each node, by the node's name."""
    index: NodeIndex = msgspec.field(default_factory=NodeIndex)
    """The nodes that have a model label."""
    registers: Mapping[str, Registers] = {}
    """The registers of each node, by the node's name."""
    registered: Mapping[str, int] = {}
    """The nodes that a scheme serves by its register, by the name of the scheme, as a set of ``index``."""
    types: CardTypes = CardTypes()
    """The registered types of card by model."""
    free: FreeCardsByPool = {}
    """The free cards, as far as they are published."""
    named: CardModels = NO_ROWS
    """The models of products, which are the values of the model label."""
    seen: Mapping[str, frozenset[str]] = {}
    """The values of the model label on nodes, by model."""
    outdated: Mapping[str, frozenset[str]] = {}
    """The schemes that do not serve a node although it has their register, by the node's name."""

    @classmethod
    def of(
        cls,
        labels: Mapping[str, Labels],
        keys: NodeLabels,
        registers: Mapping[str, Registers] = MappingProxyType({}),
        named: CardModels = NO_ROWS,
        outdated: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> "Nodes":
        """Return these nodes. The index leaves out nodes without a model label."""
        index = NodeIndex({name: node for name, node in labels.items() if keys.model in node})
        seen: dict[str, frozenset[str]] = {}
        for value in index.values_of(keys.model):
            model = named.model_of(value)
            seen[model] = seen.get(model, frozenset()) | {value}
        schemes = {scheme for each in registers.values() for scheme in each}
        registered = {
            scheme: index.named(
                name for name, each in registers.items() if scheme in each and scheme not in outdated.get(name, ())
            )
            for scheme in schemes
        }
        found = cls(keys, labels, index, registers, registered, named=named, seen=seen, outdated=outdated)
        types = CardTypes.of(((found.model_of(name), each) for name, each in registers.items()), named)
        return msgspec.structs.replace(found, types=types)

    def named_by(self, named: CardModels) -> "Nodes":
        """Return the same nodes with their models by these rows."""
        return self if named is self.named else Nodes.of(self.labels, self.keys, self.registers, named, self.outdated)

    @property
    def models(self) -> Set[str]:
        return self.seen.keys()

    def model_of(self, name: str) -> str | None:
        """Return the GPU model of a node; None if the node or its label is unknown."""
        value = self.labels.get(name, {}).get(self.keys.model)
        return None if value is None else self.named.model_of(value)

    def having(self, model: str) -> int:
        """Return the nodes of a model, as a set of ``index``."""
        return self.index.having(self.keys.model, self.label_values(model))

    @functools.cached_property
    def cards(self) -> Mapping[str, int]:
        """The cards by model, for the models of which every node says how many it has: by a register, or by a label."""
        found: dict[str, list[int | None]] = {}
        for name, labels in self.labels.items():
            if (model := self.model_of(name)) is not None:
                register = next(iter(self.registers.get(name, {}).values()), None)
                count = labels.get(COUNT_LABEL, "")
                listed = int(count) if _COUNT.fullmatch(count) else None
                found.setdefault(model, []).append(len(register.cards) if register else listed)
        return {model: sum(filter(None, counts)) for model, counts in found.items() if None not in counts}

    @functools.cached_property
    def registered_cards(self) -> RegisteredCards:
        """The memory of the registered cards by scheme and model."""
        found: dict[tuple[str, str], set[int]] = {}
        for name, registers in self.registers.items():
            model = self.model_of(name)
            for scheme, register in registers.items():
                if model is not None:
                    listed = {card.memory for card in register.cards if card.memory and card.healthy}
                    found.setdefault((scheme, model), set()).update(listed)
        return {
            key: RegisteredMemory(min(memories, default=0), max(memories, default=0)) for key, memories in found.items()
        }

    def label_values(self, model: str) -> tuple[str, ...]:
        """Return the known values of the model label for this model, on nodes or in the quota's rows."""
        return self.named.label_values(model, self.seen.get(model, ()))

    def allowed(self, values: Values, models: Set[str]) -> Set[str]:
        """Return the models that a node can have if its model label has one of these values."""
        if not self.named.rows:
            return values.among(models)
        if values.listed is not None:
            # No node may have the value yet.
            return models & set(map(self.named.model_of, filter(values.allow, values.listed)))
        return {model for model in models if any(map(values.allow, self.label_values(model)))}


NO_NODES = Nodes()
