"""Reads recorded decisions of gpu-admission (master of 2020-11-26) about pods in 24 random clusters.

Each cluster is a scenario, whose nodes do not change. Each step of a scenario has the pods stored before, the pod to
be placed, the nodes that passed gpu-admission's filter, and the annotations that gpu-admission wrote.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from controller.extender.strategy import Assignment, NodeCards, Placement, bin_pack
from tests.builders import Manifest, view
from vcuda.allocations.cards import CardRequest, Unplaceable, read_cards, read_pod_cards
from vcuda.k8s_types import Pod

Strategy = Callable[[CardRequest, Iterable[str], NodeCards], Placement | Mapping[str, Unplaceable]]

FILE = Path(__file__).parent / "data" / "gpu-admission-decisions.json"


class Step(NamedTuple):
    """One decision. ``place``: scenario and step, such as ``1003/7``. ``written``: the annotations without the time."""

    place: str
    nodes: tuple[Manifest, ...]
    stored: tuple[Pod, ...]
    pod: Pod
    passed: tuple[str, ...]
    written: Mapping[str, str]

    def known(self) -> NodeCards:
        """Return the cards of each node, reduced by what the stored pods use of them."""
        known = {node["metadata"]["name"]: read_cards(node["status"]["capacity"]) for node in self.nodes}
        for holding in filter(None, map(read_pod_cards, self.stored)):
            cards = known[holding.node]
            assert not isinstance(cards, Unplaceable)
            known[holding.node] = cards.taken(holding.shares)
        return known


def steps() -> Iterator[Step]:
    """Yield every recorded decision, in order."""
    recorded: dict[str, Any] = json.loads(FILE.read_text())
    for scenario in recorded["scenarios"]:
        nodes = tuple(scenario["nodes"])
        number = nodes[0]["metadata"]["name"].removeprefix("vec").partition("-")[0]
        for index, step in enumerate(scenario["steps"]):
            stored = tuple(map(view, step["pods"]))
            passed, written = tuple(step["passed"] or ()), step["annotations"] or {}
            yield Step(f"{number}/{index}", nodes, stored, view(step["pod"]), passed, written)


def least_free(request: CardRequest, names: Iterable[str], nodes: NodeCards) -> Placement | Mapping[str, Unplaceable]:
    """Choose like gpu-admission: the fullest node on which the pod fits, even if a whole card becomes shared."""
    with mock.patch.object(Assignment, "breaks", 0):
        return bin_pack(request, names, nodes)
