"""Tests that the extender repeats the recorded decisions of gpu-admission, except for those in `ELSEWHERE`.

The decisions of gpu-admission (master of 2020-11-26) are about pods in 24 random clusters. Each cluster is a scenario,
whose nodes do not change. Each step of a scenario has the pods stored before, the pod to be placed, the nodes that
passed gpu-admission's filter, and the annotations that gpu-admission wrote.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from controller.extender.strategy import Assignment, NodeCards, Placement, bin_pack
from tests.builders import Manifest, view
from vcuda.allocations.cards import (
    CardRequest,
    Unplaceable,
    allocating,
    read_capacity,
    read_card_request,
    read_pod_cards,
)
from vcuda.k8s_types import Pod

Strategy = Callable[[CardRequest, Iterable[str], NodeCards], Placement | Mapping[str, Unplaceable]]

FILE = Path(__file__).parents[1] / "data" / "gpu-admission-decisions.json"


class Step(NamedTuple):
    """A recorded decision. ``place``: scenario and step, as ``1003/7``. ``written``: annotations without the time."""

    place: str
    nodes: tuple[Manifest, ...]
    stored: tuple[Pod, ...]
    pod: Pod
    passed: tuple[str, ...]
    written: Mapping[str, str]

    def known(self) -> NodeCards:
        """Return the cards of each node, without the cores and memory that the stored pods use."""
        known = {node["metadata"]["name"]: read_capacity(node["status"]["capacity"]) for node in self.nodes}
        for holding in filter(None, map(read_pod_cards, self.stored)):
            cards = known[holding.node]
            assert not isinstance(cards, Unplaceable)
            known[holding.node] = cards.taken(holding.shares)
        return known


def steps() -> Iterator[Step]:
    recorded: dict[str, Any] = json.loads(FILE.read_text())
    for scenario in recorded["scenarios"]:
        nodes = tuple(scenario["nodes"])
        number = nodes[0]["metadata"]["name"].removeprefix("vec").partition("-")[0]
        for index, step in enumerate(scenario["steps"]):
            stored = tuple(map(view, step["pods"]))
            passed, written = tuple(step["passed"] or ()), step["annotations"] or {}
            yield Step(f"{number}/{index}", nodes, stored, view(step["pod"]), passed, written)


def least_free(request: CardRequest, names: Iterable[str], nodes: NodeCards) -> Placement | Mapping[str, Unplaceable]:
    """Choose as gpu-admission does: the fullest node on which the pod fits, even if an unused card becomes shared."""
    with mock.patch.object(Assignment, "breaks", 0):
        return bin_pack(request, names, nodes)


EVERY = tuple(steps())

ELSEWHERE = {
    "1003/3": "10 cores join the shares on n0; gpu-admission breaks up the one whole card of n4",
    "1003/7": "10 and 30 cores of one pod go on one card of n3; on n2 their memory breaks up two",
    "1005/6": "50 cores join a share on n2; gpu-admission breaks up the last whole card of n3",
    "1005/7": "80 cores join a share on n2; gpu-admission breaks up the last whole card of n1",
    "1005/10": "30 cores join a share on n2; gpu-admission breaks up the last whole card of n3",
    "1007/6": "20 cores join a share on n2; gpu-admission breaks up the last whole card of n0",
}
"""The decisions in which the extender chooses another node, and so leaves one more card completely free."""


def answer(step: Step, strategy: Strategy) -> tuple[tuple[str, ...], Mapping[str, str], int]:
    """Return the nodes where the pod fits, the annotations without time, and how many unused cards become shared."""
    request = read_card_request(step.pod)
    if request is None:
        return tuple(node["metadata"]["name"] for node in step.nodes), {}, 0
    assert isinstance(request, CardRequest)
    known = step.known()
    choice = strategy(request, known, known)
    if not isinstance(choice, Placement):
        return (), {}, 0
    written = allocating(request.scheme, choice.node, choice.assignment.shares, 0)
    timeless = {key: value for key, value in written.items() if not key.endswith("/predicate-time")}
    return (choice.node,), timeless, choice.assignment.breaks


def test_by_the_least_free_node_every_recorded_decision_is_reproduced() -> None:
    assert len(EVERY) == 279
    assert [step.place for step in EVERY if answer(step, least_free)[:2] != (step.passed, step.written)] == []


def test_by_packing_every_recorded_decision_is_reproduced_except_those_listed() -> None:
    others = [step for step in EVERY if answer(step, bin_pack)[:2] != (step.passed, step.written)]
    assert [step.place for step in others] == [*ELSEWHERE]
    assert all(answer(step, bin_pack)[2] < answer(step, least_free)[2] for step in others)
