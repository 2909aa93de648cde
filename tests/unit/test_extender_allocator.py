"""Tests of the extender's allocator, which chooses a node and cards for a pod.

It writes each placement to a journal (a ConfigMap) before the scheduler gets its answer. No share is allocated twice.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

from controller.extender.allocator import DEADLINE_SECONDS
from controller.extender.journal import TIMEOUT
from controller.extender.protocol import PreemptionArgs, Victims
from tests.api_double import ApiDouble, Delivery, Effect, Late, Script, lost_reply, lost_request
from tests.extended import (
    JOURNAL,
    NO_CARD,
    UNBOUND_SECONDS,
    Leader,
    as_stored,
    forbidden,
    gpu_node,
    journaled,
    on_card,
    pod_path,
    shares,
    store_pod,
)
from vcuda.allocations.cards import Share
from vcuda.errors import Unavailable
from vcuda.k8s_types import DEFAULT_GRACE_SECONDS as GRACE_SECONDS, Pod

COMPONENT = Path(__file__).parents[2] / "manifests" / "components" / "scheduler"


@pytest.fixture
def leader(api: ApiDouble) -> Leader:
    return Leader(api).leads()


def test_a_pod_is_placed_and_journaled_before_the_answer(api: ApiDouble, leader: Leader) -> None:
    pod = store_pod(api, "train", 30)
    api.forget_calls()
    answer = leader.filter(pod)
    assert (answer["NodeNames"], answer["Error"]) == (["n1"], "")
    assert (api.calls, journaled(api)) == (["PUT"], {"n1": {"train": [Share(0, 30, 4864)]}})
    assert "annotations" not in as_stored(api, "train")["metadata"], "the binding writes the annotations"


def test_pods_placed_in_quick_succession_never_get_the_same_share(api: ApiDouble, leader: Leader) -> None:
    """The watch has not delivered these pods yet, so only the journal shows which cards they have."""
    pods = [store_pod(api, f"pod-{number}", 60) for number in range(3)]
    answers = [leader.filter(pod) for pod in pods]
    assert [answer["NodeNames"] for answer in answers] == [["n1"], ["n1"], []]
    assert answers[2]["FailedNodes"] == {"n1": "no card with 60 cores and 9728 MiB free"}
    assert [shares(api, f"pod-{number}") for number in range(3)] == [[Share(0, 60, 9728)], [Share(1, 60, 9728)], []]


def test_a_pod_that_needs_no_card_passes_and_nothing_is_written(api: ApiDouble, leader: Leader) -> None:
    api.forget_calls()
    assert leader.filter({"metadata": {"name": "web"}, "spec": {}}, ["n1", "cpu"])["NodeNames"] == ["n1", "cpu"]
    assert api.calls == []


def test_a_pod_that_no_node_can_serve_has_a_reason_for_each_node(api: ApiDouble, leader: Leader) -> None:
    pod = store_pod(api, "train", 150)
    answer = leader.filter(pod, ["n1", "n2"])
    reason = "a request of more than 100 cores must be a multiple of 100, because it gets whole cards"
    assert answer["FailedAndUnresolvableNodes"] == {"n1": reason, "n2": reason}


def test_a_pod_that_was_placed_and_not_bound_is_placed_again_on_its_node(api: ApiDouble) -> None:
    """gpu-admission, in contrast, rejects a pod that was placed and not bound."""
    leader = Leader(api, cards={"n1": 1, "n2": 2}).leads()
    pod = store_pod(api, "train", 100)
    for names in (["n2"], ["n1", "n2"]):
        assert leader.filter(pod, names)["NodeNames"] == ["n2"]
    assert journaled(api) == {"n1": {}, "n2": {"train": [Share(0, 100, 16384)]}}


def test_a_pod_whose_node_is_no_longer_offered_moves_and_releases_the_first_node(api: ApiDouble) -> None:
    leader = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("train", "n2", 100)
    assert leader.filter(as_stored(api, "train"), ["n1"])["NodeNames"] == ["n1"]
    assert leader.filter(store_pod(api, "next", 100), ["n1", "n2"])["NodeNames"] == ["n2"]


@pytest.mark.parametrize("told_by", ["scheduler", "watch"])
@pytest.mark.parametrize(
    ("change", "error"),
    [({"spec": {"nodeName": "n7"}}, "the pod is bound to n7 already"), ({"status": {"phase": "Failed"}}, "has ended")],
)
def test_a_pod_that_is_bound_or_has_ended_is_not_placed(
    api: ApiDouble, leader: Leader, change: dict[str, dict[str, str]], error: str, told_by: str
) -> None:
    old = store_pod(api, "train", 30)
    api.store(pod_path("train"), {**old, **{key: {**old.get(key, {}), **new} for key, new in change.items()}})
    if told_by == "watch":
        leader.sees("train")
    answer = leader.filter(as_stored(api, "train") if told_by == "scheduler" else old)
    assert error in answer["Error"]
    assert (answer["NodeNames"], shares(api, "train")) == ([], [])


class Call(NamedTuple):
    """A call of the scheduler for pod ``train``. ``ask`` makes it, and returns its error. ``done`` tests success."""

    ask: Callable[[], str]
    done: Callable[[], bool]


@pytest.fixture(params=["filter", "bind"])
def call(request: pytest.FixtureRequest, api: ApiDouble, leader: Leader) -> Call:
    pod = store_pod(api, "train", 100)
    if request.param == "filter":
        return Call(lambda: leader.filter(pod)["Error"], lambda: bool(shares(api, "train")))
    leader.place("train")
    return Call(lambda: leader.bind("train", "n1"), lambda: "nodeName" in as_stored(api, "train")["spec"])


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("slow", [("PUT",), ("POST",), ("GET",), ("PUT", "POST", "GET")], ids="+".join)
def test_the_scheduler_is_answered_before_its_timeout_even_if_the_api_server_is_slow(
    api: ApiDouble, leader: Leader, call: Call, slow: tuple[str, ...], answered: bool
) -> None:
    """During the call, other clients change the pod and the journal."""

    def deliver(method: str, timeout: float, effect: Effect) -> bytes:
        leader.seconds += timeout if method in slow else 0.0
        if method == "POST":
            api.store(pod_path("train"), as_stored(api, "train"))
        if method == "PUT":
            api.store(JOURNAL, api.objects[JOURNAL])
        if method in slow and not answered:
            raise Unavailable("timed out")
        return effect()

    api.deliver = deliver
    assert call.ask()
    assert leader.seconds <= DEADLINE_SECONDS


@pytest.mark.parametrize(("delivery", "says"), [(lost_request, "timed out"), (forbidden, "it is forbidden")])
def test_a_placement_that_is_not_journaled_does_not_take_effect(
    api: ApiDouble, call: Call, delivery: Delivery, says: str
) -> None:
    api.deliver = Script(delivery, methods=("PUT",))
    assert says in call.ask()
    assert not call.done()
    assert (call.ask(), call.done()) == ("", True)


@pytest.mark.parametrize("delivery", [lost_reply, Late()])
def test_the_next_call_resolves_a_journal_write_of_unknown_outcome(
    api: ApiDouble, call: Call, delivery: Delivery
) -> None:
    api.deliver = Script(delivery, methods=("PUT",))
    assert "timed out" in call.ask()
    if isinstance(delivery, Late):
        delivery.land()
    assert (call.ask(), call.done()) == ("", True)


def test_the_scheduler_waits_longer_than_an_answer_takes() -> None:
    """If credentials have expired, the extender sends its last API call a second time. There must be time for this."""
    config = yaml.safe_load((COMPONENT / "scheduler-config.yaml").read_text())["extenders"]
    assert [each["httpTimeout"] for each in config] == ["15s"]
    assert DEADLINE_SECONDS + TIMEOUT <= 15


def test_two_processes_that_both_believe_they_lead_see_each_others_placements(api: ApiDouble, leader: Leader) -> None:
    """A process whose write of the journal conflicts reads the placements that the other process wrote."""
    other = Leader(api).leads()
    for name, who in zip(("a", "b", "c"), itertools.cycle((leader, other))):
        who.filter(store_pod(api, name, 100))
    assert [[share.card for share in shares(api, name)] for name in ("a", "b", "c")] == [[0], [1], []]


def test_a_late_journal_write_is_rejected_or_counted(api: ApiDouble, leader: Leader) -> None:
    late = Late()
    api.deliver = Script(late, methods=("PUT",))
    assert "timed out" in leader.filter(store_pod(api, "late", 100))["Error"]
    for name in ("next", "last"):
        leader.filter(store_pod(api, name, 100))
    late.land()
    assert [len(shares(api, name)) for name in ("late", "next", "last")] == [0, 1, 1]


def test_a_pod_created_and_deleted_unseen_is_removed_at_the_second_check(api: ApiDouble, leader: Leader) -> None:
    for name in ("gone", "stays"):
        leader.filter(store_pod(api, name, 100))
    api.remove(pod_path("gone"))
    for left in ({"gone", "stays"}, {"stays"}):
        leader.allocator.tidy()
        assert journaled(api)["n1"].keys() == left
    assert leader.filter(store_pod(api, "next", 100))["NodeNames"] == ["n1"]


@pytest.mark.parametrize("answer", [lost_request, lambda *_: b"<html>"])
def test_a_failed_lookup_is_repeated_later(api: ApiDouble, leader: Leader, answer: Delivery) -> None:
    leader.filter(store_pod(api, "train", 100))
    leader.allocator.tidy()
    api.remove(pod_path("train"))
    api.deliver = Script(answer, methods=("GET",))
    for left in (True, False):
        leader.allocator.tidy()
        assert bool(shares(api, "train")) == left


@pytest.mark.parametrize("end", ["ends", "goes", "is bound elsewhere"])
def test_a_pod_keeps_its_cards_until_it_ends_is_deleted_or_is_bound_elsewhere(
    api: ApiDouble, leader: Leader, end: str
) -> None:
    leader.place("train", cores=200)
    placed = as_stored(api, "train")
    assert leader.filter(store_pod(api, "next", 100))["FailedNodes"] == {"n1": NO_CARD}
    if end == "goes":
        api.remove(pod_path("train"))
    elif end == "ends":
        api.store(pod_path("train"), {**placed, "status": {"phase": "Succeeded"}})
    else:
        api.store(pod_path("train"), {**placed, "spec": {**placed["spec"], "nodeName": "n2"}})
    leader.sees("train", placed)
    assert leader.filter(as_stored(api, "next"))["NodeNames"] == ["n1"]
    assert journaled(api)["n1"].keys() == {"next"}


def test_a_bound_pod_that_vanishes_keeps_its_cards_for_its_grace_period_under_any_leader(
    api: ApiDouble, leader: Leader
) -> None:
    """After a forced deletion, the containers of the pod may run until the end of its grace period."""
    leader.place("train", cores=200)
    leader.bind("train", "n1")
    leader.sees("train")
    bound = as_stored(api, "train")
    api.remove(pod_path("train"))
    leader.sees("train", bound)
    pod = store_pod(api, "next", 100)
    assert leader.filter(pod)["FailedNodes"] == {"n1": NO_CARD}
    leader.allocator.tidy()
    later = Leader(api).leads()
    for later.seconds in (0, GRACE_SECONDS - 1):
        later.allocator.tidy()
        assert later.filter(pod)["FailedNodes"] == {"n1": NO_CARD}
    later.seconds = GRACE_SECONDS
    later.allocator.tidy()
    assert later.filter(pod)["NodeNames"] == ["n1"]


def test_an_unbound_pod_keeps_its_cards_for_a_time_and_a_bound_one_without_limit(
    api: ApiDouble, leader: Leader
) -> None:
    for name in ("waits", "runs"):
        leader.place(name, cores=100)
    leader.bind("runs", "n1")
    leader.sees("runs")
    leader.seconds = UNBOUND_SECONDS - 1
    leader.allocator.tidy()
    assert journaled(api)["n1"].keys() == {"waits", "runs"}
    leader.seconds = 1000 * UNBOUND_SECONDS
    leader.allocator.tidy()
    assert journaled(api)["n1"].keys() == {"runs"}


def test_a_changed_or_returning_node_has_the_shares_of_its_journal(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", cores=100)
    leader.cache.node_changed(gpu_node("n1", 2), None)
    assert leader.filter(store_pod(api, "next", 100))["FailedNodes"] == {"n1": "the node is not known yet"}
    leader.cache.node_changed(None, gpu_node("n1", 1))
    assert leader.filter(as_stored(api, "next"))["FailedNodes"] == {"n1": NO_CARD}
    leader.cache.node_changed(gpu_node("n1", 1), gpu_node("n1", 2))
    assert leader.filter(as_stored(api, "next"))["NodeNames"] == ["n1"]


def test_pods_are_placed_on_a_new_node_at_once(api: ApiDouble, leader: Leader) -> None:
    leader.cache.node_changed(None, gpu_node("n2", 1))
    assert leader.filter(store_pod(api, "train", 100), ["n2"])["NodeNames"] == ["n2"]


FORGED = [
    {"spec": {"nodeName": "n1"}, "annotations": on_card(0)},
    {"spec": {"nodeName": "n1"}, "annotations": on_card(0), "status": {"phase": "Running"}},
    {"spec": {}, "annotations": {**on_card(0), "tencent.com/predicate-time": "9" * 19}},
]


@pytest.mark.parametrize("forged", FORGED, ids=["bound", "running", "not bound, time in the future"])
def test_annotations_that_the_extender_did_not_write_are_ignored(
    api: ApiDouble, leader: Leader, forged: dict[str, dict[str, str]]
) -> None:
    """If forged annotations counted, a user could occupy a node with eight tiny pods."""
    made = store_pod(api, "forged", 5, annotations=forged["annotations"])
    api.store(pod_path("forged"), {**made, **forged, "spec": {**made["spec"], **forged["spec"]}})
    leader.sees("forged")
    for who in (leader, Leader(api).leads()):
        assert who.filter(store_pod(api, "train", 200))["NodeNames"] == ["n1"]


def test_cards_stay_allocated_after_any_edit_of_the_pod_by_its_owner(api: ApiDouble, leader: Leader) -> None:
    """If an edit released the cards, another pod could get a card that is still in use."""
    leader.place("mine", cores=60)
    leader.bind("mine", "n1")
    bound = as_stored(api, "mine")
    for written in ({}, on_card(1), on_card(0, node="n2")):
        api.store(pod_path("mine"), {**bound, "metadata": {**bound["metadata"], "annotations": written}})
        for who in (leader, Leader(api).leads()):
            who.sees("mine", bound)
            assert who.filter(store_pod(api, "theirs", 200))["FailedAndUnresolvableNodes"] == {}
            assert who.filter(as_stored(api, "theirs"))["NodeNames"] == []
            assert shares(api, "mine") == [Share(0, 60, 9728)]


def test_the_cards_of_pods_bound_earlier_are_adopted_once(api: ApiDouble) -> None:
    store_pod(api, "before", 100, nodeName="n1", annotations=on_card(1))
    store_pod(api, "ended", 100, nodeName="n1", annotations=on_card(0))
    store_pod(api, "waits", 100, annotations=on_card(0))
    elsewhere = {"gaia.tencent.com/gpu-model": "P100"}
    store_pod(api, "pinned elsewhere", 100, nodeName="n1", nodeSelector=elsewhere, annotations=on_card(0))
    api.store(pod_path("ended"), {**as_stored(api, "ended"), "status": {"phase": "Failed"}})
    Leader(api).leads()
    assert journaled(api) == {"n1": {"before": [Share(1, 100, 16384)]}}
    store_pod(api, "before", 100, nodeName="n1", annotations=on_card(0))
    store_pod(api, "after", 100, nodeName="n1", annotations=on_card(0))
    Leader(api).leads()
    assert journaled(api) == {"n1": {"before": [Share(1, 100, 16384)]}}


def test_victims_that_make_no_room_on_a_single_card_are_not_preempted(api: ApiDouble) -> None:
    """The scheduler only adds up the free cores. Two free halves of cards are not the whole card that the pod needs."""
    leader = Leader(api, cards={"n1": 2, "n2": 1}).leads()
    for name, node, cores in (("a", "n1", 60), ("b", "n1", 60), ("c", "n1", 30), ("d", "n2", 30)):
        leader.place(name, node, cores)
    wanted = msgspec.convert(store_pod(api, "big", 100), Pod)
    for victims, makes_room in ((("uid-b",), True), (("uid-c",), False), (("uid-a", "uid-c"), True)):
        plan = {"n1": Victims(victims, 1)}
        assert leader.allocator.preempt(PreemptionArgs(wanted, plan)) == (plan if makes_room else {})
    both = {"n1": Victims(("uid-c",), 0), "n2": Victims(("uid-d",), 0), "unknown": Victims((), 0)}
    assert leader.allocator.preempt(PreemptionArgs(wanted, both)) == {"n2": both["n2"]}
    assert leader.allocator.preempt(PreemptionArgs(Pod(), both)) == both, (
        "a pod without a request for cards must be ignored"
    )
