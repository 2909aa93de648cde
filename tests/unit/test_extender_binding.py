"""Tests of bindings by the scheduler extender.

A pod is bound only with the cards that the journal (the ConfigMap of placements) has for it. A late binding never
allocates cards a second time.
"""

import json
from collections.abc import Mapping
from unittest import mock

import pytest

from controller.extender.protocol import BindingArgs
from tests.api_double import ApiDouble, Late, Script, before, delivered, lost_reply, lost_request
from tests.builders import container, pod, vcuda_pod
from tests.extended import (
    CORES,
    JOURNAL,
    Leader,
    as_stored,
    forbidden,
    journaled,
    limits,
    on_card,
    pod_path,
    shares,
    store_pod,
)

NOT_PLACED = "the pod is no longer placed on n1"
UNKNOWN = "the outcome of the binding is unknown"


@pytest.fixture
def leader(api: ApiDouble) -> Leader:
    return Leader(api, cards={"n1": 1, "n2": 1}).leads()


def node_of(api: ApiDouble, name: str) -> str | None:
    found: str | None = as_stored(api, name)["spec"].get("nodeName")
    return found


def binding_at(api: ApiDouble) -> list[str]:
    """Return the pod's resourceVersion for each binding to node n1 in the journal."""
    return [entry["binding"] for entry in json.loads(api.objects[JOURNAL]["data"]["placements"])["placements"]]


def test_a_pod_is_bound_where_it_was_placed_at_its_version_and_with_its_cards(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    pod = as_stored(api, "train")
    leader.seconds = 7
    api.forget_calls()
    with mock.patch.object(api, "post", wraps=api.post) as post:
        assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET", "PUT", "POST"]
    path, body = post.call_args.args
    binding = json.loads(body)
    assert path == f"{pod_path('train')}/binding"
    assert binding["target"] == {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    annotations = {
        "tencent.com/predicate-time": "7000000000",
        "tencent.com/predicate-node": "n1",
        "tencent.com/predicate-gpu-idx-0": "0",
        "tencent.com/gpu-assigned": "false",
    }
    assert binding["metadata"] == {**pod["metadata"], "annotations": annotations}
    assert binding_at(api) == [pod["metadata"]["resourceVersion"]]
    assert (node_of(api, "train"), as_stored(api, "train")["metadata"]["annotations"]) == ("n1", annotations)


@pytest.mark.parametrize("asked", [limits(60), {CORES: 100}, limits(100), {CORES: 200}, limits(200)], ids=str)
def test_a_pod_is_bound_before_the_watch_has_delivered_it(api: ApiDouble, asked: Mapping[str, int]) -> None:
    leader = Leader(api, cards={"n1": 2}).leads()
    metadata = {"name": "train", "namespace": "team-a", "uid": "uid-train"}
    api.store(pod_path("train"), vcuda_pod(asked, metadata=metadata))
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == ["n1"]
    assert leader.bind("train", "n1") == ""


def test_the_allocation_replaces_annotations_that_the_owner_wrote_meanwhile(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1", 100)
    store_pod(api, "train", 100, annotations={**on_card(7, node="n2"), "mine": "kept"})
    assert leader.bind("train", "n1") == ""
    written = as_stored(api, "train")["metadata"]["annotations"]
    assert written.items() >= {**on_card(0), "mine": "kept"}.items()


@pytest.mark.parametrize("placed_by", ["nobody", "its owner"])
def test_a_pod_that_was_not_placed_is_not_bound(api: ApiDouble, leader: Leader, placed_by: str) -> None:
    store_pod(api, "train", 60, annotations=on_card(0) if placed_by == "its owner" else {})
    assert leader.bind("train", "n1") == NOT_PLACED
    assert leader.bind("train", "unknown") == "the pod is no longer placed on unknown"
    assert node_of(api, "train") is None


def test_the_next_leader_binds_a_pod_that_its_predecessor_placed_later(api: ApiDouble, leader: Leader) -> None:
    later = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("train", "n1")
    assert later.bind("train", "n1") == ""


def test_a_second_call_finds_the_pod_bound(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    leader.bind("train", "n1")
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET"]


def test_a_moved_pod_is_not_bound_to_its_former_node(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    leader.place("train", "n2")
    assert leader.bind("train", "n1") == NOT_PLACED
    assert node_of(api, "train") is None
    assert leader.bind("train", "n2") == ""
    assert leader.bind("train", "n1") == "the pod is bound to n2 already"


@pytest.mark.parametrize("moved_by", ["us", "next"])
@pytest.mark.parametrize("lands", [True, False])
def test_the_cards_of_a_binding_that_may_land_stay_allocated(
    api: ApiDouble, leader: Leader, moved_by: str, lands: bool
) -> None:
    late = Late()
    leader.place("train", "n1")
    api.deliver = Script(late, methods=("POST",))
    assert UNKNOWN in leader.bind("train", "n1")
    if moved_by == "next":
        leader = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("train", "n2")
    waiting = store_pod(api, "waiting", 60)
    assert leader.filter(waiting, ["n1", "n2"])["NodeNames"] == []
    if lands:
        late.land()
    assert leader.bind("train", "n2") == ("the pod is bound to n1 already" if lands else "")
    assert node_of(api, "train") == ("n1" if lands else "n2")
    leader.sees("train")
    free = "n2" if lands else "n1"
    assert leader.filter(waiting, ["n1", "n2"])["NodeNames"] == [free]
    late.land()
    assert leader.bind("waiting", free) == ""


def test_a_binding_at_an_outdated_version_keeps_no_cards(api: ApiDouble, leader: Leader) -> None:
    """The scheduler wrote the failure into the pod's status, which changed the pod's version. Late bindings fail."""
    leader.place("train", "n1")
    api.deliver = Script(lost_request, methods=("POST",))
    assert UNKNOWN in leader.bind("train", "n1")
    store_pod(api, "train", 60, labels={"new": "version"})
    leader.place("train", "n2")
    assert leader.filter(store_pod(api, "next", 100), ["n1"])["NodeNames"] == ["n1"]


def test_a_pod_keeps_the_cards_of_a_binding_that_may_land(api: ApiDouble) -> None:
    leader, late = Leader(api, cards={"n1": 2}).leads(), Late()
    leader.place("first", "n1", 100)
    leader.place("train", "n1", 100)
    api.deliver = Script(late, methods=("POST",))
    leader.bind("train", "n1")
    first = as_stored(api, "first")
    api.remove(pod_path("first"))
    leader.sees("first", first)
    assert leader.filter(as_stored(api, "train"))["NodeNames"] == ["n1"]
    late.land()
    assert [share.card for share in shares(api, "train")] == [1]
    assert as_stored(api, "train")["metadata"]["annotations"].items() >= on_card(1).items()


def test_bindings_of_unknown_outcome_do_not_fill_the_journal(api: ApiDouble, leader: Leader) -> None:
    """The scheduler retries a binding as long as the pod exists, so the number of bindings has no bound."""
    leader.place("train", "n1")
    for _ in range(5):
        api.deliver = Script(lost_request, methods=("POST",))
        assert UNKNOWN in leader.bind("train", "n1")
    assert len(binding_at(api)) == 1
    api.deliver = Script(lost_reply, methods=("POST",))
    assert leader.bind("train", "n1") == ""


def test_a_pod_that_changed_meanwhile_is_read_and_bound_at_its_new_version(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    api.deliver = before("POST", lambda: api.store(pod_path("train"), as_stored(api, "train")))
    api.forget_calls()
    assert leader.bind("train", "n1") == ""
    assert api.calls == ["GET", "PUT", "POST"] * 2


def test_binding_a_pod_that_others_change_continuously_fails(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    api.deliver = before("POST", lambda: api.store(pod_path("train"), as_stored(api, "train")), times=1000)
    assert leader.bind("train", "n1") == "the pod was changed during every attempt to bind it"


@pytest.mark.parametrize(
    ("uid", "error"),
    [("uid-other", "the pod was deleted, and another pod has its name"), (None, "the pod was deleted")],
)
def test_a_deleted_pod_is_not_bound(api: ApiDouble, leader: Leader, uid: str | None, error: str) -> None:
    leader.place("train", "n1")
    if uid:
        pod = as_stored(api, "train")
        api.store(pod_path("train"), {**pod, "metadata": {**pod["metadata"], "uid": uid}})
    else:
        api.remove(pod_path("train"))
    assert leader.bind("train", "n1") == error


def test_a_call_with_another_pods_uid_does_not_affect_that_pod(api: ApiDouble, leader: Leader) -> None:
    leader.place("train", "n1")
    store_pod(api, "other", 60)
    for name in ("other", "nobody"):
        assert "the pod was deleted" in leader.allocator.bind(BindingArgs("team-a", name, "uid-train", "n1"))
    assert leader.filter(as_stored(api, "other"), ["n1"])["NodeNames"] == []


def test_a_rejected_binding_is_reported_and_the_pod_keeps_its_cards_for_the_next_one(
    api: ApiDouble, leader: Leader
) -> None:
    leader.place("train", "n1")
    api.deliver = Script(forbidden, methods=("POST",))
    assert "it is forbidden" in leader.bind("train", "n1")
    api.deliver = delivered
    assert leader.filter(store_pod(api, "other", 60), ["n1"])["NodeNames"] == []
    assert leader.bind("train", "n1") == ""


def test_a_pod_that_requests_zero_cards_is_bound_without_an_allocation(api: ApiDouble, leader: Leader) -> None:
    """The pod names a GPU resource with amount 0, so the scheduler calls the extender to bind the pod."""
    store_pod(api, "train", 0)
    assert leader.bind("train", "cpu") == ""
    assert (node_of(api, "train"), journaled(api)) == ("cpu", {"n1": {}, "n2": {}})


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (pod(container())["spec"], "the pod requests no vcuda cards, so the extender does not bind it"),
        (pod(container(), init=[container(limits(30))])["spec"], "init containers cannot get vcuda cards"),
    ],
)
def test_a_pod_that_the_extender_never_places_is_bound_to_no_node(
    api: ApiDouble, leader: Leader, spec: Mapping[str, object], error: str
) -> None:
    api.store(pod_path("train"), {**store_pod(api, "train", 30), "spec": spec})
    assert leader.bind("train", "n1") == error
    assert node_of(api, "train") is None
