"""Counts the cards of each GPU model, by the sources that the watches of the core read."""

import functools
import operator
import re
from collections.abc import Iterable, Mapping

from vcuda.placement.nodes import COUNT_LABEL, Nodes, NodeStates
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import PLAIN_CARDS
from vcuda.requests.schemes import Scheme

_COUNT = re.compile(r"[0-9]{1,4}", re.ASCII)


def count_cards(
    nodes: Nodes, states: NodeStates, published: Mapping[str, int], schemes: Iterable[Scheme]
) -> Mapping[str, int]:
    """Return the number of cards of each model. A model is left out if one of its nodes has an unknown number of cards.

    ``published``: the number of cards that DRA drivers publish for a node, by the node's name.
    """
    offered = _offered(nodes, states, schemes)
    found: dict[str, list[int | None]] = {}
    for name in nodes.index.names:
        labels, register = nodes.labels[name], next(iter(nodes.registers.get(name, {}).values()), None)
        count = labels.get(COUNT_LABEL, "")
        listed = int(count) if _COUNT.fullmatch(count) else offered.get(name)
        cards = published.get(name, listed) if register is None else len(register)
        found.setdefault(nodes.model_of(name) or "", []).append(cards)
    return {model: sum(filter(None, counts)) for model, counts in found.items() if None not in counts}


def _offered(nodes: Nodes, states: NodeStates, schemes: Iterable[Scheme]) -> dict[str, int]:
    """Return the number of cards that device plugins offer on a node, by the node's name."""
    # A card in MIG mode is not offered as a card. So the offer of a node with MIG slices is not its number of cards.
    sliced = [each.values() for resource, each in states.offering.items() if resource.startswith(PROFILE)]
    whole = ~functools.reduce(operator.or_, (bits for each in sliced for bits in each), 0)
    cores_of = {PLAIN_CARDS: CORES_PER_CARD, **{scheme.cores: 1 for scheme in schemes if scheme.cores}}
    offers = [
        (cores * amount // CORES_PER_CARD, bits & whole)
        for resource, cores in cores_of.items()
        for amount, bits in states.offering.get(resource, {}).items()
    ]
    return {name: cards for at, name in enumerate(nodes.index.names) for cards, bits in offers if bits >> at & 1}
