"""Placements: decided, promised, written, and only then answered; whatever fails, no share is given twice."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

from controller.extender.journal import DEADLINE_SECONDS, TIMEOUT
from controller.extender.protocol import PreemptionArgs, Victims
from tests.api_double import ApiDouble, Delivery, Effect, Late, Script, delivered, lost_reply, lost_request
from tests.extended import JOURNAL, Leader, as_stored, forbidden, gpu_node, journaled, pod_path, seen, shares, store_pod
from vcuda.allocations.cards import Share
from vcuda.errors import Unavailable
from vcuda.k8s_types import Pod

COMPONENT = Path(__file__).parents[2] / "manifests" / "components" / "scheduler"


@pytest.fixture
def leader(api: ApiDouble) -> Leader:
    return Leader(api).leads()


def test_a_pod_is_placed_written_down_and_annotated_before_the_answer(api: ApiDouble, leader: Leader) -> None:
    pod = store_pod(api, "train", 30)
    api.forget_calls()
    answer = leader.filter(pod)
    assert (answer["NodeNames"], answer["Error"]) == (["n1"], "")
    assert (api.calls, journaled(api)) == (["PUT", "PATCH"], ["train"])
    assert as_stored(api, "train")["metadata"]["annotations"] == {
        "tencent.com/predicate-time": "1",
        "tencent.com/predicate-node": "n1",
        "tencent.com/predicate-gpu-idx-0": "0",
        "tencent.com/gpu-assigned": "false",
    }


def test_pods_placed_in_quick_succession_never_get_the_same_share(api: ApiDouble, leader: Leader) -> None:
    """The watch shows nothing in between."""
    pods = [store_pod(api, f"pod-{number}", 60) for number in range(3)]
    answers = [leader.filter(pod) for pod in pods]
    assert [answer["NodeNames"] for answer in answers] == [["n1"], ["n1"], []]
    assert answers[2]["FailedNodes"] == {"n1": "no card with 60 cores and 9728 MiB free"}
    assert [shares(api, f"pod-{number}") for number in range(3)] == [(Share(0, 60, 9728),), (Share(1, 60, 9728),), ()]


def test_a_pod_that_needs_no_card_passes_and_nothing_is_written(api: ApiDouble, leader: Leader) -> None:
    api.forget_calls()
    assert leader.filter({"metadata": {"name": "web"}, "spec": {}}, ["n1", "cpu"])["NodeNames"] == ["n1", "cpu"]
    assert api.calls == []


def test_a_pod_that_no_node_can_serve_is_told_why_on_each(api: ApiDouble, leader: Leader) -> None:
    pod = store_pod(api, "train", 150)
    answer = leader.filter(pod, ["n1", "n2"])
    reason = "cores over 100 must be whole cards, 100 each"
    assert answer["FailedAndUnresolvableNodes"] == {"n1": reason, "n2": reason}


def test_a_pod_that_was_placed_and_not_bound_is_placed_anew_on_its_node(api: ApiDouble) -> None:
    """gpu-admission refuses it for ever. Its own share is not in its way, nor is a fuller node."""
    leader = Leader(api, cards={"n1": 1, "n2": 2}).leads()
    first = store_pod(api, "train", 100)
    assert leader.filter(first, ["n2"])["NodeNames"] == ["n2"]
    again = as_stored(api, "train")
    assert leader.filter(again, ["n1", "n2"])["NodeNames"] == ["n2"]
    assert shares(api, "train") == (Share(0, 100, 16384),)


def test_where_its_node_is_no_choice_any_more_it_goes_to_another_and_frees_the_first(api: ApiDouble) -> None:
    leader = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("train", "n2", 100)
    assert leader.filter(as_stored(api, "train"), ["n1"])["NodeNames"] == ["n1"]
    assert leader.filter(store_pod(api, "next", 100), ["n1", "n2"])["NodeNames"] == ["n2"]


def test_annotations_copied_from_another_pod_give_way_to_the_placement(api: ApiDouble, leader: Leader) -> None:
    copied = {"tencent.com/predicate-gpu-idx-3": "7", "nvidia.com/predicate-node": "n9", "mine": "kept"}
    leader.filter(store_pod(api, "train", 100, annotations=copied))
    written = as_stored(api, "train")["metadata"]["annotations"]
    assert {"tencent.com/predicate-gpu-idx-3", "nvidia.com/predicate-node"}.isdisjoint(written)
    assert written["mine"] == "kept"


def test_a_pod_that_changed_meanwhile_is_read_and_placed_at_its_new_version(api: ApiDouble, leader: Leader) -> None:
    old = store_pod(api, "train", 30)
    store_pod(api, "train", 30, labels={"new": "label"})
    assert leader.filter(old)["NodeNames"] == ["n1"]
    assert shares(api, "train") == (Share(0, 30, 4864),)
    assert len(leader.cache.assumed()) == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"spec": {"nodeName": "n7"}}, "the pod is bound to n7 already"),
        ({"metadata": {"uid": "uid-other"}}, "the pod is gone, and another has its name"),
        (None, f"{pod_path('train')} not found"),
    ],
    ids=["bound", "made anew", "deleted"],
)
def test_a_pod_that_is_not_to_be_placed_is_not(
    api: ApiDouble, leader: Leader, change: dict[str, dict[str, str]] | None, error: str
) -> None:
    old = store_pod(api, "train", 30)
    if change is None:
        api.remove(pod_path("train"))
    else:
        api.store(pod_path("train"), {**old, **{key: {**old[key], **fields} for key, fields in change.items()}})
    answer = leader.filter(old)
    assert error in answer["Error"]
    assert (answer["NodeNames"], leader.cache.assumed()) == ([], ())


class Call(NamedTuple):
    """One call of the scheduler about pod ``train``: ``ask`` returns the error, ``done`` whether it came to be."""

    ask: Callable[[], str]
    done: Callable[[], bool]
    method: str


@pytest.fixture(params=["PATCH", "POST"], ids=["filter", "bind"])
def call(request: pytest.FixtureRequest, api: ApiDouble, leader: Leader) -> Call:
    store_pod(api, "train", 100)
    if request.param == "PATCH":
        pod = as_stored(api, "train")
        return Call(lambda: leader.filter(pod)["Error"], lambda: bool(shares(api, "train")), "PATCH")
    leader.filter(as_stored(api, "train"))
    leader.sees("train")
    return Call(lambda: leader.bind("train", "n1"), lambda: "nodeName" in as_stored(api, "train")["spec"], "POST")


def test_a_pod_that_others_change_all_the_time_is_left(api: ApiDouble, leader: Leader, call: Call) -> None:
    def busy(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == call.method:
            api.store(pod_path("train"), as_stored(api, "train"))
        return effect()

    api.deliver = busy
    assert call.ask() == "the pod changes too often"
    assert leader.cache.assumed() == ()


@pytest.mark.parametrize("answered", [True, False])
@pytest.mark.parametrize("slow", [("PUT",), ("PATCH", "POST"), ("GET",), ("PUT", "PATCH", "POST", "GET")], ids="+".join)
def test_the_scheduler_is_answered_before_it_gives_up_however_slow_the_api_server_is(
    api: ApiDouble, leader: Leader, call: Call, slow: tuple[str, ...], answered: bool
) -> None:
    """And whoever else writes the pod and the journal at the same time."""

    def deliver(method: str, timeout: float, effect: Effect) -> bytes:
        leader.seconds += timeout if method in slow else 0.0
        if method == call.method:
            api.store(pod_path("train"), as_stored(api, "train"))
        if method == "PUT" and leader.seconds < 6:
            api.store(JOURNAL, api.objects[JOURNAL])
        if method in slow and not answered:
            raise Unavailable("timed out")
        return effect()

    api.deliver = deliver
    assert call.ask()
    assert leader.seconds <= DEADLINE_SECONDS
    assert leader.lost == 0


def test_a_call_whose_answer_was_lost_is_found_to_have_landed(api: ApiDouble, call: Call) -> None:
    api.deliver = Script(lost_reply, methods=(call.method,))
    assert (call.ask(), call.done()) == ("", True)


def test_a_call_that_is_refused_counts_no_more(api: ApiDouble, leader: Leader, call: Call) -> None:
    api.deliver = Script(forbidden, methods=(call.method,))
    assert "it is forbidden" in call.ask()
    assert leader.cache.assumed() == ()


@pytest.mark.parametrize("delivery", [lost_request, lost_reply])
def test_what_is_not_written_down_is_not_sent(api: ApiDouble, leader: Leader, call: Call, delivery: Delivery) -> None:
    api.deliver = Script(delivery, methods=("PUT",))
    assert "timed out" in call.ask()
    assert (call.done(), leader.cache.assumed()) == (False, ())
    api.deliver = delivered
    assert (call.ask(), call.done(), leader.lost) == ("", True, 0)


def test_a_deposed_leader_does_nothing_and_ends(api: ApiDouble, leader: Leader, call: Call) -> None:
    Leader(api, "them").leads()
    assert call.ask() == "them has taken the journal of placements"
    assert (leader.lost, call.done()) == (1, False)


def test_the_scheduler_waits_longer_than_an_answer_takes() -> None:
    """By one call more, as one whose credentials have run out is made twice."""
    config = yaml.safe_load((COMPONENT / "scheduler-config.yaml").read_text())["extenders"]
    assert [each["httpTimeout"] for each in config] == ["15s"]
    assert DEADLINE_SECONDS + TIMEOUT <= 15


@pytest.mark.parametrize("leads", ["us", "them"])
def test_while_a_patch_may_land_still_its_shares_are_nobody_elses(api: ApiDouble, leader: Leader, leads: str) -> None:
    """It lands long after its sender gave it up; the pod that came between has the other card, whoever leads then."""
    pod, late = store_pod(api, "late", 100), Late()
    api.deliver = Script(late, methods=("PATCH",))
    assert "not known" in leader.filter(pod)["Error"]
    if leads == "them":
        leader = Leader(api, leads).leads()
    for name in ("next", "last"):
        leader.filter(store_pod(api, name, 100))
    assert journaled(api) == ["late", "next"]
    late.land()
    cards = [[share.card for share in shares(api, name)] for name in ("late", "next", "last")]
    assert cards == [[0], [1], []]


def test_a_patch_that_can_never_land_any_more_gives_its_shares_back(api: ApiDouble, leader: Leader) -> None:
    api.deliver = Script(lost_request, methods=("PATCH",))
    leader.filter(store_pod(api, "late", 100))
    store_pod(api, "late", 100)
    leader.sees("late")
    assert leader.cache.assumed() == ()


def test_while_it_is_not_known_which_of_two_places_a_pod_has_it_has_both(api: ApiDouble) -> None:
    leader = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("moves", "n1", 100)
    api.deliver = Script(Late(), methods=("PATCH",))
    assert "not known" in leader.filter(as_stored(api, "moves"), ["n2"])["Error"]
    answer = leader.filter(store_pod(api, "next", 100), ["n1", "n2"])
    assert answer["FailedNodes"] == dict.fromkeys(["n1", "n2"], "1 whole vcuda cards needed, 0 free")


def test_the_next_call_for_the_pod_places_it_while_both_patches_count(api: ApiDouble, leader: Leader) -> None:
    """Only one of the two can land: the pod has one card in the end, and the watch tells which."""
    pod, late = store_pod(api, "late", 100), Late()
    api.deliver = Script(late, methods=("PATCH",))
    leader.filter(pod)
    assert leader.filter(pod)["NodeNames"] == ["n1"]
    late.land()
    leader.sees("late")
    assert leader.cache.assumed() == ()
    assert leader.filter(store_pod(api, "next", 100))["NodeNames"] == ["n1"]


def test_a_pod_that_came_and_went_unseen_is_forgotten_at_the_second_look(api: ApiDouble, leader: Leader) -> None:
    for name in ("gone", "stays"):
        leader.filter(store_pod(api, name, 100))
    api.remove(pod_path("gone"))
    for left in (["gone", "stays"], ["stays"]):
        leader.allocator.forget_gone()
        assert [placement.name for placement in leader.cache.assumed()] == left
    assert leader.filter(store_pod(api, "next", 100))["NodeNames"] == ["n1"]


@pytest.mark.parametrize("answer", [lost_request, lambda *_: b"<html>"])
def test_what_cannot_be_looked_for_now_is_looked_for_later(api: ApiDouble, leader: Leader, answer: Delivery) -> None:
    leader.filter(store_pod(api, "train", 100))
    leader.allocator.forget_gone()
    api.remove(pod_path("train"))
    api.deliver = Script(answer, methods=("GET",))
    for left in (["train"], []):
        leader.allocator.forget_gone()
        assert [placement.name for placement in leader.cache.assumed()] == left


def test_what_the_watch_shows_late_gives_nothing_back_that_was_given_since(api: ApiDouble, leader: Leader) -> None:
    """The watch shows the pod as it was before the placement; the placement still counts."""
    before = store_pod(api, "train", 100)
    leader.filter(before, ["n1"])
    leader.cache.pod_changed(None, seen(before))
    leader.filter(store_pod(api, "next", 100))
    assert shares(api, "next") == (Share(1, 100, 16384),)
    leader.sees("train", before)
    assert [placement.name for placement in leader.cache.assumed()] == ["next"]


def test_a_pod_that_ended_or_went_gives_its_cards_back(api: ApiDouble, leader: Leader) -> None:
    for name in ("ends", "goes"):
        leader.place(name, cores=100)
    assert leader.filter(store_pod(api, "next", 100))["NodeNames"] == []
    ended = {**as_stored(api, "ends"), "status": {"phase": "Succeeded"}}
    api.store(pod_path("ends"), ended)
    goes = as_stored(api, "goes")
    api.remove(pod_path("goes"))
    leader.sees("ends")
    leader.sees("goes", goes)
    assert leader.filter(store_pod(api, "big", 200))["NodeNames"] == ["n1"]


def test_a_node_that_changes_or_comes_back_has_the_shares_that_are_stored(api: ApiDouble, leader: Leader) -> None:
    leader.filter(store_pod(api, "train", 100))
    leader.cache.node_changed(gpu_node("n1", 2), None)
    assert leader.filter(store_pod(api, "next", 100))["FailedNodes"] == {"n1": "node not seen yet"}
    leader.cache.node_changed(None, gpu_node("n1", 1))
    assert leader.filter(as_stored(api, "next"))["FailedNodes"] == {"n1": "1 whole vcuda cards needed, 0 free"}
    leader.cache.node_changed(gpu_node("n1", 1), gpu_node("n1", 2))
    assert leader.filter(as_stored(api, "next"))["NodeNames"] == ["n1"]


def test_a_new_leader_lists_what_landed_and_drops_what_cannot(api: ApiDouble, leader: Leader) -> None:
    leader.filter(store_pod(api, "landed", 100))
    api.deliver = Script(lost_request, methods=("PATCH",))
    leader.filter(store_pod(api, "never", 100))
    store_pod(api, "never", 100, labels={"changed": "since"})
    them = Leader(api, "them").leads()
    assert them.cache.assumed() == ()
    assert them.filter(store_pod(api, "next", 100))["NodeNames"] == ["n1"]


def test_our_own_last_write_of_the_journal_may_land_unheard(api: ApiDouble, leader: Leader) -> None:
    pod, late = store_pod(api, "train", 100), Late()
    api.deliver = Script(late, methods=("PUT",))
    assert leader.filter(pod)["Error"]
    late.land()
    assert leader.filter(pod)["NodeNames"] == ["n1"]


def test_a_journal_that_was_deleted_ends_its_holder(api: ApiDouble, leader: Leader) -> None:
    leader.filter(store_pod(api, "train", 30))
    api.remove(JOURNAL)
    assert "was deleted" in leader.filter(store_pod(api, "next", 30))["Error"]
    assert leader.lost == 1


def test_victims_that_make_no_room_on_any_one_card_are_spared(api: ApiDouble) -> None:
    """The scheduler counts by sums: two halves on two cards are no whole card."""
    leader = Leader(api, cards={"n1": 2, "n2": 1}).leads()
    for name, node, cores in (("a", "n1", 60), ("b", "n1", 60), ("c", "n1", 30), ("d", "n2", 30)):
        leader.filter(store_pod(api, name, cores), [node])
    wanted = msgspec.convert(store_pod(api, "big", 100), Pod)
    for victims, makes_room in ((("uid-b",), True), (("uid-c",), False), (("uid-a", "uid-c"), True)):
        plan = {"n1": Victims(victims, 1)}
        assert leader.allocator.preempt(PreemptionArgs(wanted, plan)) == (plan if makes_room else {})
    both = {"n1": Victims(("uid-c",), 0), "n2": Victims(("uid-d",), 0), "unknown": Victims((), 0)}
    assert leader.allocator.preempt(PreemptionArgs(wanted, both)) == {"n2": both["n2"]}
    assert leader.allocator.preempt(PreemptionArgs(Pod(), both)) == both, "a pod that asks for no cards is none of ours"
