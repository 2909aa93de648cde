"""Bindings: checked, written down, sent with their placement; whenever they land, no share is given twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from controller.extender.protocol import BindingArgs
from tests.api_double import ApiDouble, Effect, Late, Script, delivered, lost_request
from tests.builders import container, vcuda_pod
from tests.extended import JOURNAL, Leader, as_stored, journaled, limits, pod_path, seen, shares, store_pod
from vcuda.errors import ApiError

INDEX = "tencent.com/predicate-gpu-idx-0"


@pytest.fixture
def leader(api: ApiDouble) -> Leader:
    """A leader beside two nodes of one card each."""
    return Leader(api, cards={"n1": 1, "n2": 1}).leads()


def place(leader: Leader, name: str, node: str, cores: int = 60) -> None:
    """Have a pod placed on a node, and the watch show that."""
    if pod_path(name) not in leader.api.objects:
        store_pod(leader.api, name, cores)
    answer = leader.filter(as_stored(leader.api, name), [node])
    assert answer["NodeNames"] == [node], answer
    leader.cache.pod_changed(None, seen(as_stored(leader.api, name)))


def node_of(api: ApiDouble, name: str) -> str | None:
    found: str | None = as_stored(api, name)["spec"].get("nodeName")
    return found


def edit(leader: Leader, name: str, index: str) -> None:
    """Have the owner of a pod write other cards on it, and the watch show that."""
    pod = as_stored(leader.api, name)
    pod["metadata"]["annotations"][INDEX] = index
    leader.api.store(pod_path(name), pod)
    leader.cache.pod_changed(None, seen(as_stored(leader.api, name)))


def test_a_pod_is_bound_where_it_was_placed_at_the_version_that_was_placed(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    sent: list[Any] = []
    post = api.kube.post

    def keep(path: str, body: bytes, *more: Any, **options: Any) -> bytes:
        sent.append((path, json.loads(body)))
        return post(path, body, *more, **options)

    api.post = keep  # type: ignore[method-assign]  # what is sent is what this is about
    pod = as_stored(api, "train")
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET", "PUT", "POST"]
    [(path, binding)] = sent
    assert path == f"{pod_path('train')}/binding"
    assert binding == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "train",
            "namespace": "team-a",
            "uid": "uid-train",
            "resourceVersion": pod["metadata"]["resourceVersion"],
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "n1"},
    }
    assert node_of(api, "train") == "n1"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(limits(60), id="a share"),
        pytest.param({"tencent.com/vcuda-core": 100}, id="a card, no word of its memory"),
        pytest.param(limits(100), id="a card"),
        pytest.param({"tencent.com/vcuda-core": 200}, id="two cards"),
        pytest.param({"tencent.com/vcuda-core": 200, "tencent.com/vcuda-memory": 128}, id="two cards, their memory"),
    ],
)
def test_a_pod_is_bound_though_the_watch_has_not_shown_its_placement(api: ApiDouble, asked: Mapping[str, int]) -> None:
    """The scheduler is often faster."""
    leader = Leader(api, cards={"n1": 2}).leads()
    metadata = {"name": "train", "namespace": "team-a", "uid": "uid-train"}
    api.store(pod_path("train"), vcuda_pod(asked, metadata=metadata))
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == ["n1"]
    assert leader.bind("train", "n1") == ""


def test_bindings_whose_outcome_is_not_known_do_not_fill_the_journal(api: ApiDouble, leader: Leader) -> None:
    """The scheduler tries each pod again and again, for as long as it lasts."""
    place(leader, "train", "n1")
    for _ in range(5):
        api.deliver = Script(lost_request, methods=("POST",))
        assert "whether the pod was bound is not known" in leader.bind("train", "n1")
    assert len(leader.cache.assumed()) == 1
    api.deliver = delivered
    assert leader.bind("train", "n1") == ""


def test_it_is_written_down_before_it_is_sent_and_until_it_is_seen(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    leader.bind("train", "n1")
    assert journaled(api) == ["train"]
    assert len(leader.cache.assumed()) == 1
    leader.cache.pod_changed(None, seen(as_stored(api, "train")))
    assert leader.cache.assumed() == ()


def test_a_binding_takes_nothing_that_the_pod_does_not_have_already(api: ApiDouble, leader: Leader) -> None:
    """Were its shares counted beside those on the pod, nobody would get the rest of the card meanwhile."""
    place(leader, "train", "n1", 60)
    leader.bind("train", "n1")
    place(leader, "other", "n1", 40)
    assert shares(api, "other")[0].card == 0


def test_a_second_call_finds_the_pod_bound(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    leader.bind("train", "n1")
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET"]


def test_a_pod_that_was_moved_is_not_bound_where_it_was(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    place(leader, "train", "n2")
    assert leader.bind("train", "n1") == "the pod is not placed on n1 any more"
    assert node_of(api, "train") is None
    assert leader.bind("train", "n2") == ""
    assert leader.bind("train", "n1") == "the pod is bound to n2 already"


def test_a_pod_whose_placement_was_removed_meanwhile_is_not_bound(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    store_pod(api, "train", 60)
    assert leader.bind("train", "n1") == "the pod is not placed on n1 any more"


@pytest.mark.parametrize("moved_by", ["the same leader", "the next leader"])
def test_a_binding_that_lands_when_the_pod_was_moved_is_refused(api: ApiDouble, leader: Leader, moved_by: str) -> None:
    """It names the version that was placed on the first node, so nobody need keep these cards for it."""
    late = Late()
    place(leader, "train", "n1")
    api.deliver = Script(late, methods=("POST",))
    assert "whether the pod was bound is not known" in leader.bind("train", "n1")
    api.deliver = delivered
    if moved_by == "the next leader":
        leader = Leader(api, "next", {"n1": 1, "n2": 1}).leads()
    waiting = store_pod(api, "waiting", 60)
    assert leader.filter(waiting, ["n1"])["NodeNames"] == []
    place(leader, "train", "n2")
    assert leader.filter(waiting, ["n1"])["NodeNames"] == ["n1"]
    late.land()
    assert node_of(api, "train") is None
    assert leader.bind("train", "n2") == ""
    assert leader.bind("waiting", "n1") == ""


def test_a_binding_that_lands_when_another_pod_has_the_name_is_refused(api: ApiDouble, leader: Leader) -> None:
    late = Late()
    place(leader, "train", "n1")
    pod = as_stored(api, "train")
    api.deliver = Script(late, methods=("POST",))
    leader.bind("train", "n1")
    api.deliver = delivered
    api.remove(pod_path("train"))
    api.store(pod_path("train"), {**pod, "metadata": {**pod["metadata"], "uid": "uid-another"}})
    late.land()
    assert node_of(api, "train") is None


@pytest.mark.parametrize("end", ["bound", "ended", "gone"])
def test_what_a_binding_may_bring_is_free_once_the_pod_is_elsewhere_or_gone(
    api: ApiDouble, leader: Leader, end: str
) -> None:
    place(leader, "train", "n1")
    api.deliver = Script(lost_request, methods=("POST",))
    leader.bind("train", "n1")
    api.deliver = delivered
    before = as_stored(api, "train")
    if end == "bound":
        place(leader, "train", "n2")
        leader.bind("train", "n2")
    elif end == "ended":
        api.store(pod_path("train"), {**before, "status": {"phase": "Failed"}})
    else:
        api.remove(pod_path("train"))
    after = None if end == "gone" else seen(as_stored(api, "train"))
    leader.cache.pod_changed(seen(before), after)
    assert leader.cache.assumed() == ()
    assert leader.filter(store_pod(api, "next", 100), ["n1"])["NodeNames"] == ["n1"]


def test_a_pod_that_changed_meanwhile_is_read_and_bound_at_its_new_version(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")

    def changed(_method: str, _timeout: float, effect: Effect) -> bytes:
        api.store(pod_path("train"), as_stored(api, "train"))
        return effect()

    api.deliver = Script(changed, methods=("POST",))
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET", "PUT", "POST"] * 2


@pytest.mark.parametrize(
    ("uid", "error"), [("uid-other", "the pod is gone, and another has its name"), (None, "the pod is gone")]
)
def test_a_pod_that_is_gone_is_not_bound(api: ApiDouble, leader: Leader, uid: str | None, error: str) -> None:
    place(leader, "train", "n1")
    pod = as_stored(api, "train")
    api.remove(pod_path("train"))
    if uid:
        api.store(pod_path("train"), {**pod, "metadata": {**pod["metadata"], "uid": uid}})
    assert leader.bind("train", "n1") == error
    assert leader.cache.assumed() == ()


def test_a_caller_that_names_the_uid_of_another_takes_nothing_from_that(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    store_pod(api, "other", 60)
    for name in ("other", "nobody"):
        assert "the pod is gone" in leader.allocator.bind(BindingArgs("team-a", name, "uid-train", "n1"))
    assert leader.filter(as_stored(api, "other"), ["n1"])["NodeNames"] == []


def test_a_binding_that_is_refused_is_told_and_counts_no_more(api: ApiDouble, leader: Leader) -> None:
    def forbidden(*_: object) -> bytes:
        raise ApiError(403, "pods/binding is forbidden: 100% sure")

    place(leader, "train", "n1")
    api.deliver = Script(forbidden, methods=("POST",))
    assert "pods/binding is forbidden" in leader.bind("train", "n1")
    assert leader.cache.assumed() == ()
    assert journaled(api) == [], "the next leader would count it"


def test_a_refusal_that_cannot_be_written_down_counts_no_more_all_the_same(api: ApiDouble, leader: Leader) -> None:
    def forbidden(*_: object) -> bytes:
        raise ApiError(403, "pods/binding is forbidden")

    place(leader, "train", "n1")
    api.deliver = Script(delivered, forbidden, lost_request, methods=("PUT", "POST"))
    assert leader.bind("train", "n1") == "pods/binding is forbidden (HTTP 403)"
    assert leader.cache.assumed() == ()


@pytest.mark.parametrize(
    ("cores", "index", "error"),
    [
        (60, "0", "the cards on the pod are not free on n1"),
        (60, "7", "the cards on the pod are not free on n1"),
        (200, "1", "the cards on the pod are not free on n1"),
        (200, "1,1", "the cards on the pod are not free on n1"),
        (200, "1,2", ""),
    ],
    ids=["another pod's", "none", "too few", "one twice", "as given"],
)
def test_a_pod_is_not_bound_with_cards_of_its_owner_s(api: ApiDouble, cores: int, index: str, error: str) -> None:
    leader = Leader(api, cards={"n1": 3}).leads()
    place(leader, "other", "n1", 60)
    place(leader, "train", "n1", cores)
    edit(leader, "train", index)
    assert leader.bind("train", "n1") == error
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == (["n1"] if error else [])


def test_cards_that_the_watch_has_not_shown_are_not_those_that_were_given(api: ApiDouble, leader: Leader) -> None:
    place(leader, "train", "n1")
    pod = as_stored(api, "train")
    pod["metadata"]["annotations"][INDEX] = "1"
    api.store(pod_path("train"), pod)
    assert leader.bind("train", "n1") == "the cards on the pod are not those that it was given on n1"


def test_a_pod_without_cards_is_bound_as_any_scheduler_would(api: ApiDouble, leader: Leader) -> None:
    """It names the resource, and so the scheduler asks us."""
    store_pod(api, "train", 0)
    before = api.objects[JOURNAL]
    assert leader.bind("train", "cpu") == ""
    assert (node_of(api, "train"), shares(api, "train")) == ("cpu", ())
    assert api.objects[JOURNAL] is before


def test_a_pod_that_no_node_can_serve_is_bound_to_none(api: ApiDouble, leader: Leader) -> None:
    init = [container(limits(30), name="init")]
    manifest = vcuda_pod(limits(30), metadata={"name": "train", "namespace": "team-a", "uid": "uid-train"})
    api.store(pod_path("train"), {**manifest, "spec": {**manifest["spec"], "initContainers": init}})
    assert leader.bind("train", "n1") == "init containers cannot get vcuda cards"
