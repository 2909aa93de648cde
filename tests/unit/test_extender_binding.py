"""Bindings: checked, written down, sent with their placement; whenever they land, no share is given twice."""

import json
from collections.abc import Mapping
from unittest import mock

import pytest

from controller.extender.protocol import BindingArgs
from tests.api_double import ApiDouble, Delivery, Effect, Late, Script, delivered, lost_request
from tests.builders import container, vcuda_pod
from tests.extended import CORES, JOURNAL, Leader, as_stored, forbidden, journaled, limits, pod_path, shares, store_pod

NOT_FREE = "the cards on the pod are not free on n1"
INDEX = "tencent.com/predicate-gpu-idx-0"


@pytest.fixture
def leader(api: ApiDouble) -> Leader:
    """A leader beside two nodes of one card each."""
    return Leader(api, cards={"n1": 1, "n2": 1}).leads()


def node_of(api: ApiDouble, name: str) -> str | None:
    found: str | None = as_stored(api, name)["spec"].get("nodeName")
    return found


def edit(api: ApiDouble, name: str, index: str) -> None:
    """Have the owner of a pod write other cards on it."""
    pod = as_stored(api, name)
    pod["metadata"]["annotations"][INDEX] = index
    api.store(pod_path(name), pod)


def test_a_pod_is_bound_where_it_was_placed_at_the_version_that_was_placed(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    pod = as_stored(api, "train")
    api.forget_calls()
    with mock.patch.object(api, "post", wraps=api.post) as post:
        assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET", "PUT", "POST"]
    path, body = post.call_args.args
    binding = json.loads(body)
    assert path == f"{pod_path('train')}/binding"
    assert binding["metadata"] == {key: value for key, value in pod["metadata"].items() if key != "annotations"}
    assert binding["target"] == {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    assert (node_of(api, "train"), journaled(api), len(leader.cache.assumed())) == ("n1", ["train"], 1)
    leader.sees("train")
    assert leader.cache.assumed() == ()


@pytest.mark.parametrize("asked", [limits(60), {CORES: 100}, limits(100), {CORES: 200}, limits(200)], ids=str)
def test_a_pod_is_bound_though_the_watch_has_not_shown_its_placement(api: ApiDouble, asked: Mapping[str, int]) -> None:
    """The scheduler is often faster."""
    leader = Leader(api, cards={"n1": 2}).leads()
    metadata = {"name": "train", "namespace": "team-a", "uid": "uid-train"}
    api.store(pod_path("train"), vcuda_pod(asked, metadata=metadata))
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == ["n1"]
    assert leader.bind("train", "n1") == ""


def test_bindings_whose_outcome_is_not_known_do_not_fill_the_journal(api: ApiDouble, leader: Leader) -> None:
    """The scheduler tries each pod again and again, for as long as it lasts."""
    leader.place("train", "n1")
    for _ in range(5):
        api.deliver = Script(lost_request, methods=("POST",))
        assert "whether the pod was bound is not known" in leader.bind("train", "n1")
    assert len(leader.cache.assumed()) == 1
    api.deliver = delivered
    assert leader.bind("train", "n1") == ""


def test_a_binding_takes_nothing_that_the_pod_does_not_have_already(api: ApiDouble, leader: Leader) -> None:
    """Were its shares counted beside those on the pod, nobody would get the rest of the card meanwhile."""
    leader.place("train", "n1", 60)
    leader.bind("train", "n1")
    leader.place("other", "n1", 40)
    assert shares(api, "other")[0].card == 0


def test_a_second_call_finds_the_pod_bound(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    leader.bind("train", "n1")
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET"]


def test_a_pod_that_was_moved_is_not_bound_where_it_was(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    leader.place("train", "n2")
    assert leader.bind("train", "n1") == "the pod is not placed on n1 any more"
    assert node_of(api, "train") is None
    assert leader.bind("train", "n2") == ""
    assert leader.bind("train", "n1") == "the pod is bound to n2 already"


def test_a_pod_whose_placement_was_removed_meanwhile_is_not_bound(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    store_pod(api, "train", 60)
    assert leader.bind("train", "n1") == "the pod is not placed on n1 any more"


@pytest.mark.parametrize("moved_by", ["us", "next"])
def test_a_binding_that_lands_when_the_pod_was_moved_is_refused(api: ApiDouble, leader: Leader, moved_by: str) -> None:
    """It names the version that was placed on the first node, so nobody need keep these cards for it."""
    late = Late()
    leader.place("train", "n1")
    api.deliver = Script(late, methods=("POST",))
    assert "whether the pod was bound is not known" in leader.bind("train", "n1")
    api.deliver = delivered
    if moved_by == "next":
        leader = Leader(api, moved_by, {"n1": 1, "n2": 1}).leads()
    waiting = store_pod(api, "waiting", 60)
    assert leader.filter(waiting, ["n1"])["NodeNames"] == []
    leader.place("train", "n2")
    assert leader.filter(waiting, ["n1"])["NodeNames"] == ["n1"]
    late.land()
    assert node_of(api, "train") is None
    assert leader.bind("train", "n2") == ""
    assert leader.bind("waiting", "n1") == ""


@pytest.mark.parametrize("end", ["bound", "ended", "gone"])
def test_what_a_binding_may_bring_is_free_once_the_pod_is_elsewhere_or_gone(
    api: ApiDouble, leader: Leader, end: str
) -> None:
    leader.place("train", "n1")
    api.deliver = Script(lost_request, methods=("POST",))
    leader.bind("train", "n1")
    api.deliver = delivered
    before = as_stored(api, "train")
    if end == "bound":
        leader.place("train", "n2")
        leader.bind("train", "n2")
    elif end == "ended":
        api.store(pod_path("train"), {**before, "status": {"phase": "Failed"}})
    else:
        api.remove(pod_path("train"))
    leader.sees("train", before)
    assert leader.cache.assumed() == ()
    assert leader.filter(store_pod(api, "next", 100), ["n1"])["NodeNames"] == ["n1"]


def test_a_pod_that_changed_meanwhile_is_read_and_bound_at_its_new_version(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")

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
    leader.place("train", "n1")
    if uid:
        pod = as_stored(api, "train")
        api.store(pod_path("train"), {**pod, "metadata": {**pod["metadata"], "uid": uid}})
    else:
        api.remove(pod_path("train"))
    assert leader.bind("train", "n1") == error
    assert leader.cache.assumed() == ()


def test_a_caller_that_names_the_uid_of_another_takes_nothing_from_that(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    store_pod(api, "other", 60)
    for name in ("other", "nobody"):
        assert "the pod is gone" in leader.allocator.bind(BindingArgs("team-a", name, "uid-train", "n1"))
    assert leader.filter(as_stored(api, "other"), ["n1"])["NodeNames"] == []


@pytest.mark.parametrize(("second_put", "left"), [(delivered, []), (lost_request, ["train"])])
def test_a_binding_that_is_refused_counts_no_more_and_is_not_left_to_the_next_leader_if_that_can_be_written_down(
    api: ApiDouble, leader: Leader, second_put: Delivery, left: list[str]
) -> None:
    leader.place("train", "n1")
    api.deliver = Script(delivered, forbidden, second_put, methods=("PUT", "POST"))
    assert "it is forbidden" in leader.bind("train", "n1")
    assert (leader.cache.assumed(), journaled(api)) == ((), left)


@pytest.mark.parametrize(
    ("cores", "index", "error"),
    [(60, "0", NOT_FREE), (60, "7", NOT_FREE), (200, "1", NOT_FREE), (200, "1,1", NOT_FREE), (200, "1,2", "")],
    ids=["another pod's", "none", "too few", "one twice", "as given"],
)
def test_a_pod_is_not_bound_with_cards_of_its_owner_s(api: ApiDouble, cores: int, index: str, error: str) -> None:
    leader = Leader(api, cards={"n1": 3}).leads()
    leader.place("other", "n1", 60)
    leader.place("train", "n1", cores)
    edit(api, "train", index)
    leader.sees("train")
    assert leader.bind("train", "n1") == error
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == (["n1"] if error else [])


def test_cards_that_the_watch_has_not_shown_are_not_those_that_were_given(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    edit(api, "train", "1")
    assert leader.bind("train", "n1") == "the cards on the pod are not those that it was given on n1"


def test_a_pod_without_cards_is_bound_as_any_scheduler_would(api: ApiDouble, leader: Leader) -> None:
    """It names the resource, and so the scheduler asks us."""
    store_pod(api, "train", 0)
    before = api.objects[JOURNAL]
    assert leader.bind("train", "cpu") == ""
    assert (node_of(api, "train"), shares(api, "train")) == ("cpu", ())
    assert api.objects[JOURNAL] is before


def test_a_pod_that_no_node_can_serve_is_bound_to_none(api: ApiDouble, leader: Leader) -> None:
    store_pod(api, "train", 30, initContainers=[container(limits(30), name="init")])
    assert leader.bind("train", "n1") == "init containers cannot get vcuda cards"
