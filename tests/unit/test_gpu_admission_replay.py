"""Tests that the extender decides as gpu-admission did in its recorded decisions, except for those in `ELSEWHERE`."""

from collections.abc import Mapping
from typing import NamedTuple

from controller.extender.strategy import Placement, bin_pack
from tests.decisions import Step, Strategy, least_free, steps
from vcuda.allocations.cards import CardRequest, annotations_for, read_card_request


class Answer(NamedTuple):
    """A decision: the nodes that pass, the annotations without the time, and how many unused cards become shared."""

    passed: tuple[str, ...]
    written: Mapping[str, str]
    breaks: int = 0


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


def answer(step: Step, strategy: Strategy) -> Answer:
    request = read_card_request(step.pod)
    if request is None:
        return Answer(tuple(node["metadata"]["name"] for node in step.nodes), {})
    assert isinstance(request, CardRequest)
    known = step.known()
    choice = strategy(request, known, known)
    if not isinstance(choice, Placement):
        return Answer((), {})
    written = annotations_for(request.scheme, choice.node, choice.assignment.shares, 0)
    timeless = {key: value for key, value in written.items() if not key.endswith("/predicate-time")}
    return Answer((choice.node,), timeless, choice.assignment.breaks)


def test_by_the_least_free_node_every_recorded_decision_is_reproduced() -> None:
    assert len(EVERY) == 279
    assert [step.place for step in EVERY if answer(step, least_free)[:2] != (step.passed, step.written)] == []


def test_by_packing_every_recorded_decision_is_reproduced_except_those_listed() -> None:
    others = [step for step in EVERY if answer(step, bin_pack)[:2] != (step.passed, step.written)]
    assert [step.place for step in others] == [*ELSEWHERE]
    assert all(answer(step, bin_pack).breaks < answer(step, least_free).breaks for step in others)
