"""The journal of placements: taken by compare-and-swap, written by one process alone."""

import json

import pytest

from controller.extender.journal import Deadline, Journal
from tests.api_double import ApiDouble, Effect, delivered
from tests.extended import JOURNAL, SYSTEM
from vcuda.errors import Conflict, Deposed, Unavailable, UnreadableJournal


def test_the_first_journal_is_empty_and_ours(api: ApiDouble) -> None:
    assert Journal(api.kube, SYSTEM, "us").take() == ()
    assert json.loads(api.objects[JOURNAL]["data"]["journal"]) == {"holder": "us", "placements": [], "format": 1}


def test_two_that_take_it_at_once_do_so_one_after_the_other(api: ApiDouble) -> None:
    """Whoever is first loses it to the second, by compare-and-swap, and is told at its next write."""
    ours, theirs = Journal(api.kube, SYSTEM, "us"), Journal(api.kube, SYSTEM, "them")

    def between(method: str, _timeout: float, effect: Effect) -> bytes:
        if method in ("POST", "PUT"):
            api.deliver = delivered
            theirs.take()
        return effect()

    api.deliver = between
    ours.take()
    ours.write((), Deadline())
    with pytest.raises(Deposed, match="us has taken"):
        theirs.write((), Deadline())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"holder": 3}', '{"holder": "x", "placements": [{}]}'])
def test_a_damaged_journal_is_an_error_that_says_what_to_do(api: ApiDouble, text: str) -> None:
    api.store(JOURNAL, {"metadata": {"name": "gpu-placements"}, "data": {"journal": text}})
    with pytest.raises(UnreadableJournal, match="delete it, and restart the controllers"):
        Journal(api.kube, SYSTEM, "us").take()


def test_a_journal_that_others_always_write_first_is_not_ours(api: ApiDouble) -> None:
    Journal(api.kube, SYSTEM, "them").take()

    def conflict(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "PUT":
            raise Conflict(409, "the object has been modified")
        return effect()

    api.deliver = conflict
    with pytest.raises(Unavailable, match="again and again"):
        Journal(api.kube, SYSTEM, "us").take()
