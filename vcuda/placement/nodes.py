"""The cluster's nodes: their GPU models, labels and registers (lists of cards)."""

import functools
import re
from collections.abc import Mapping, Set
from types import MappingProxyType

import msgspec

from vcuda.placement.affinity import Labels, NodeIndex, NodeLabels
from vcuda.placement.card_types import CardTypes
from vcuda.placement.registers import Registers
from vcuda.requests.resources import NO_ROWS, CardModels, RegisteredCards

COUNT_LABEL = "nvidia.com/gpu.count"
"""The node label with the number of the node's cards. NVIDIA's GPU feature discovery writes this label."""

_COUNT = re.compile(r"[0-9]{1,4}", re.ASCII)


class Nodes(msgspec.Struct, frozen=True, dict=True):
    """The nodes of the cluster at one moment."""

    keys: NodeLabels = NodeLabels()
    labels: Mapping[str, Labels] = {}
    """The labels of each node, by the node's name."""
    index: NodeIndex = msgspec.field(default_factory=NodeIndex)
    """An index of the nodes that have a model label."""
    registers: Mapping[str, Registers] = {}
    """The registers of each node, by the node's name. A register is a device plugin's list of the node's cards."""
    registered: Mapping[str, int] = {}
    """The nodes with a register that is not ``outdated``, by scheme name. Each value is a bit set of ``index``."""
    types: CardTypes = CardTypes()
    """The types of the cards in the registers, by GPU model."""
    named: CardModels = NO_ROWS
    """The entries of ``gpu_models``, which assign products to models. A product is a value of the model label."""
    seen: Mapping[str, frozenset[str]] = {}
    """For each GPU model, the values that the model label has on the nodes of this model."""
    outdated: Mapping[str, frozenset[str]] = {}
    """The schemes whose register is still on a node, although another plugin now serves it, by the node's name."""

    limited: frozenset[str] | None = None
    """The GPU models that the quota document limits; None if it is unknown. Then `knows` returns True for any model."""
    version: str = ""
    """The resourceVersion of the quota ConfigMap from which ``limited`` was read."""

    @classmethod
    def of(
        cls,
        labels: Mapping[str, Labels],
        keys: NodeLabels,
        registers: Mapping[str, Registers] = MappingProxyType({}),
        named: CardModels = NO_ROWS,
        outdated: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> "Nodes":
        """Return the nodes with these labels and registers. Nodes without a model label are not in ``index``."""
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
        """Return the same nodes with the GPU models that ``named``, the entries of ``gpu_models``, give to them."""
        return self if named is self.named else Nodes.of(self.labels, self.keys, self.registers, named, self.outdated)

    @property
    def models(self) -> Set[str]:
        return self.seen.keys()

    def knows(self, model: str) -> bool:
        """Return whether a node has this GPU model, or the quota document names it."""
        # Tenants can invent any number of other names. No quota admits a pod by such a name, and no node can run it.
        return self.limited is None or model in self.limited or model in self.seen or model in self.named.rows

    def model_of(self, name: str) -> str | None:
        """Return the GPU model of a node; None if the node is unknown or has no model label."""
        value = self.labels.get(name, {}).get(self.keys.model)
        return None if value is None else self.named.model_of(value)

    def having(self, model: str) -> int:
        """Return the set of the model's nodes, as an integer with one bit for each node of ``index``."""
        return self.index.having(self.keys.model, self.label_values(model))

    @functools.cached_property
    def cards(self) -> Mapping[str, int]:
        """The number of cards of each model. A model is left out if one of its nodes has an unknown number of cards."""
        found: dict[str, list[int | None]] = {}
        for name, labels in self.labels.items():
            if (model := self.model_of(name)) is not None:
                register = next(iter(self.registers.get(name, {}).values()), None)
                count = labels.get(COUNT_LABEL, "")
                listed = int(count) if _COUNT.fullmatch(count) else None
                found.setdefault(model, []).append(listed if register is None else len(register))
        return {model: sum(filter(None, counts)) for model, counts in found.items() if None not in counts}

    @functools.cached_property
    def registered_cards(self) -> RegisteredCards:
        found: dict[tuple[str, str], set[int]] = {}
        for name, registers in self.registers.items():
            model = self.model_of(name)
            for scheme, register in registers.items():
                if model is not None:
                    listed = {card.memory for card in register if card.memory and card.healthy}
                    found.setdefault((scheme, model), set()).update(listed)
        return found

    def label_values(self, model: str) -> tuple[str, ...]:
        """Return the known values of the model label for this model, from existing nodes and from ``gpu_models``."""
        return self._label_values.get(model) or (model,)

    def stands_for_model(self, key: str, value: str) -> bool:
        """Return whether a line of a nodeSelector has the name of a model whose nodes may have other label values."""
        return key == self.keys.model and value in self.named.rows

    def selected_values(self, key: str, value: str) -> tuple[str, ...]:
        """Return the label values for which a key and value of a nodeSelector stand."""
        return self.label_values(value) if self.stands_for_model(key, value) else (value,)

    @functools.cached_property
    def _label_values(self) -> Mapping[str, tuple[str, ...]]:
        named, seen = self.named, self.seen
        return {model: named.label_values(model, seen.get(model, ())) for model in {*named.rows, *seen}}


NO_NODES = Nodes()
