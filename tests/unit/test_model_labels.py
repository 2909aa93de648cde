"""Tests of the model label that the leader writes to nodes. It never overwrites a label that somebody else wrote."""

from typing import Any

import pytest

from controller.discover.doubts import EVENT_SECONDS, RENEWAL_SECONDS
from controller.discover.model_labels import (
    ALL,
    BETTER_SOURCE_SECONDS,
    HELD_SECONDS,
    PERIOD_SECONDS,
    REST_SECONDS,
    REWRITE_SECONDS,
    UNCHANGED_SECONDS,
)
from examples import claims
from examples.discovery import A100, A100_PRODUCT, NAME, T4, T4_PRODUCT, features, hami, labelled, node
from tests.api_double import ApiDouble, before, delivered, rejected
from tests.builders import MODEL, Manifest, stored_pod
from tests.labelling import PATH, Labeller
from tests.tables import cases
from vcuda.discovery.discovered import Doubt
from vcuda.discovery.sources import PRODUCT
from vcuda.errors import ApiError
from vcuda.kube.dra import SLICES
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.device_plugins import DISCOVERED

POD = "/api/v1/namespaces/team-a/pods/train-0"
BOTH = node(hami(A100, T4))


@pytest.fixture
def labeller(api: ApiDouble) -> Labeller:
    return Labeller(api)


def test_the_cards_of_a_model_are_unknown_if_they_are_for_one_of_its_nodes(labeller: Labeller) -> None:
    """The sum over the other nodes would be too low."""
    plain = {"allocatable": {"nvidia.com/gpu": "4"}}
    for name, model, *parts in (
        ("a", "M40", plain),
        ("b", "M40", plain),
        ("c", "P100", plain),
        ("d", "P100"),
        ("e", "", plain),
    ):
        labeller.store(node(*parts, labels={MODEL: model}, name=name), f"/api/v1/nodes/{name}")
    assert labeller.duty.cards() == {"M40": 8, "P100": None}


# Tests of who owns the model label of a node: a user or the controller


def test_a_node_without_a_label_gets_the_model_and_a_record_of_its_source(labeller: Labeller) -> None:
    labeller.store(node(hami(A100), labels={"a/b": "c"}))
    assert labeller.metadata["labels"] == {"a/b": "c", MODEL: A100_PRODUCT}
    assert labeller.metadata["annotations"][DISCOVERED] == f"{A100_PRODUCT} from hami"
    labeller.look()
    assert labeller.duty.counts() == ({"hami": 1}, {})
    assert labeller.events() == []
    labeller.api.forget_calls()
    labeller.look(UNCHANGED_SECONDS)
    assert {*labeller.api.calls} == {"LIST"}


@cases(
    "part",
    another=labelled("T4"),
    the_same=labelled(A100_PRODUCT),
    empty=labelled(""),
    in_place_of_ours={"labels": {MODEL: "T4"}, "annotations": {DISCOVERED: "A100 from hami"}},
)
def test_a_label_of_the_operator_is_never_changed(labeller: Labeller, part: Manifest) -> None:
    labeller.store(node(hami(A100), part))
    before = labeller.metadata
    for _ in range(3):
        labeller.look(UNCHANGED_SECONDS)
    assert labeller.metadata == before


def test_a_label_that_the_operator_writes_meanwhile_stays(labeller: Labeller) -> None:
    mine = node(hami(A100), labelled("mine"))
    labeller.api.deliver = before("PATCH", lambda: labeller.api.store(PATH, mine))
    labeller.store(node(hami(A100)))
    labeller.look(REWRITE_SECONDS)
    assert (labeller.label, DISCOVERED in labeller.metadata["annotations"]) == ("mine", False)


def test_a_label_that_the_watch_has_not_delivered_yet_stays(labeller: Labeller) -> None:
    labeller.api.store(PATH, node(hami(A100)))
    labeller.nodes.reflector.relist()
    labeller.api.store(PATH, node(hami(A100), labelled("mine")))
    for key in (ALL, NAME):
        labeller.duty.reconciler.turn(key)
    assert labeller.label == "mine"
    assert "PATCH" not in labeller.api.calls


def test_without_the_flag_no_node_is_written_and_no_event(api: ApiDouble) -> None:
    labeller = Labeller(api, writes=False)
    labeller.store(BOTH)
    labeller.look(UNCHANGED_SECONDS)
    assert {*api.calls} == {"LIST"}
    assert labeller.doubts() == {Doubt.SEVERAL: 1}


def test_a_label_of_gpu_feature_discovery_is_not_changed(api: ApiDouble) -> None:
    labeller = Labeller(api, keys=NodeLabels(PRODUCT))
    labeller.store(node(hami(A100)))
    assert {*api.calls} == {"LIST"}


# Tests of nodes whose model no source names, or only the cloud's label

CLOUD = {"labels": {"eks.amazonaws.com/instance-gpu-name": "t4"}, "allocatable": {"nvidia.com/gpu": "4"}}
UNKNOWN = {"allocatable": {"nvidia.com/gpu": "4"}}


def test_the_label_of_a_cloud_is_used_if_no_other_source_appears_within_a_minute(labeller: Labeller) -> None:
    labeller.store(node(CLOUD))
    labeller.look(BETTER_SOURCE_SECONDS - 1)
    assert labeller.label is None
    labeller.look()
    assert labeller.metadata["labels"][MODEL] == "NVIDIA-T4"
    assert labeller.metadata["annotations"][DISCOVERED] == "NVIDIA-T4 from cloud-label"
    labeller.look()
    assert labeller.duty.counts() == ({"cloud-label": 1}, {})


def test_a_source_that_appears_within_a_minute_has_precedence_over_the_cloud(labeller: Labeller) -> None:
    labeller.store(node(CLOUD))
    labeller.change(node(CLOUD, features("Tesla-T4")))
    assert (labeller.label, labeller.events()) == (T4_PRODUCT, [])


def test_a_node_that_offers_a_gpu_and_has_no_model_is_reported_after_a_minute(labeller: Labeller) -> None:
    """The programs that name the model of a new node may start after the device plugin of the node."""
    labeller.store(node(UNKNOWN))
    labeller.look(BETTER_SOURCE_SECONDS - 1)
    assert (labeller.doubts(), labeller.events()) == ({}, [])
    labeller.look()
    [event] = labeller.events()
    assert event.startswith("the node offers nvidia.com/gpu, but no source names its GPU model. Set label ")
    assert labeller.doubts() == {Doubt.NO_MODEL: 1}
    labeller.change(node(UNKNOWN, labelled("T4")))
    assert labeller.doubts() == {}


# Tests of nodes whose sources (for example the register of HAMi) report another GPU model than before


def test_a_lost_source_changes_nothing(labeller: Labeller) -> None:
    labeller.change(node(hami(A100)))
    labeller.change(node())
    for _ in range(3):
        labeller.look(UNCHANGED_SECONDS)
    assert (labeller.label, labeller.events()) == (A100_PRODUCT, [])


def test_another_model_is_written_when_it_has_been_found_for_five_minutes(labeller: Labeller) -> None:
    labeller.change(node(hami(A100)))
    labeller.change(node(hami(T4)))
    labeller.look(UNCHANGED_SECONDS - 1)
    assert labeller.label == A100_PRODUCT
    labeller.look(1)
    assert labeller.label == T4_PRODUCT
    assert labeller.metadata["annotations"][DISCOVERED] == f"{T4_PRODUCT} from hami"


def test_the_five_minutes_restart_with_each_change(labeller: Labeller) -> None:
    labeller.change(node(hami(A100)))
    for kind in (T4, "NVIDIA L40S", T4):
        labeller.change(node(hami(kind)))
        labeller.look(UNCHANGED_SECONDS - 10)
    assert labeller.label == A100_PRODUCT
    labeller.change(node(hami(A100)))
    labeller.change(node(hami(T4)))
    labeller.look(UNCHANGED_SECONDS - 10)
    assert labeller.label == A100_PRODUCT


@cases("claims", a_request=False, a_claim=True)
def test_another_model_is_not_written_while_a_pod_uses_the_node(labeller: Labeller, claims: bool) -> None:
    asked: dict[str, Any] = {"resourceClaims": [{"name": "gpu"}]} if claims else {}
    pod = stored_pod({} if claims else {"nvidia.com/gpu": 1}, nodeName=NAME, **asked)
    labeller.change(node(hami(A100)))
    labeller.api.store(POD, pod)
    labeller.change(node(hami(T4)))
    labeller.look(UNCHANGED_SECONDS)
    reported = f"the register of hami reports {T4_PRODUCT}, and label {A100_PRODUCT} stays"
    message = f"{reported} while pods use GPUs of the node"
    assert (labeller.label, labeller.events()) == (
        A100_PRODUCT,
        [f"{message}. Drain the node, and the label is changed"],
    )
    assert labeller.doubts() == {Doubt.HELD: 1}
    labeller.api.remove(POD)
    labeller.look(HELD_SECONDS)
    assert labeller.label == A100_PRODUCT, "its containers may still run"
    labeller.look(HELD_SECONDS)
    assert (labeller.label, labeller.doubts()) == (T4_PRODUCT, {})


def test_a_weaker_source_does_not_replace_a_lost_one(labeller: Labeller) -> None:
    labeller.change(node(hami(A100), features("Tesla-T4")))
    labeller.change(node(features("Tesla-T4")))
    labeller.look(UNCHANGED_SECONDS)
    assert labeller.label == A100_PRODUCT
    lost = (
        "the register of hami, the source of the label, is lost. Remove the label, and the controller writes it again"
    )
    message = f"GPU feature discovery reports {T4_PRODUCT}, and label {A100_PRODUCT} stays, because {lost}"
    assert message in labeller.events()
    metadata = {**labeller.metadata, "labels": node(features("Tesla-T4"))["metadata"]["labels"]}
    labeller.api.store(PATH, {**labeller.api.objects[PATH], "metadata": metadata})
    labeller.look(REWRITE_SECONDS)
    assert labeller.label == T4_PRODUCT


def test_a_stronger_source_that_says_the_same_is_recorded(labeller: Labeller) -> None:
    labeller.change(node(features(A100_PRODUCT)))
    labeller.change(node(hami(A100), features(A100_PRODUCT)))
    labeller.look(REWRITE_SECONDS)
    assert labeller.metadata["annotations"][DISCOVERED] == f"{A100_PRODUCT} from hami"
    assert labeller.label == A100_PRODUCT


def test_a_row_of_the_quota_with_our_labels_value_keeps_it(labeller: Labeller) -> None:
    labeller.change(node(hami(A100)))
    for text, label in (
        ("{A100: [NVIDIA-A100-*GB]}", A100_PRODUCT),
        (f"{{{A100_PRODUCT}: [T4], B: []}}", A100_PRODUCT),
    ):
        labeller.write_quota("{}", text)
        labeller.duty.add_all()
        labeller.look()
        labeller.look(UNCHANGED_SECONDS)
        assert labeller.label == label


def publish(labeller: Labeller) -> None:
    pool = {"name": NAME, "generation": 1, "resourceSliceCount": 1}
    cards = [claims.device(claims.A100)]
    spec = {"driver": claims.NVIDIA, "nodeName": NAME, "pool": pool, "devices": cards}
    labeller.api.store(f"{SLICES}/one", {"metadata": {"name": "one"}, "spec": spec})
    labeller.devices.reflectors()["resourceslices"].relist()


def test_a_slice_that_is_published_later_gives_its_node_a_model(labeller: Labeller) -> None:
    labeller.store(node())
    assert labeller.label is None
    publish(labeller)
    labeller.look()
    labeller.look()
    assert labeller.metadata["annotations"][DISCOVERED] == f"{A100_PRODUCT} from resourceslices"


def test_the_first_check_of_a_node_uses_its_slices(labeller: Labeller) -> None:
    publish(labeller)
    labeller.api.store(PATH, node(features("Tesla-T4")))
    labeller.nodes.reflector.relist()
    labeller.duty.reconciler.turn(NAME)
    assert labeller.metadata["annotations"][DISCOVERED] == f"{A100_PRODUCT} from resourceslices"


# Tests that a node that changes all the time causes only a bounded number of Events and writes


def test_a_source_that_changes_every_second_causes_one_event_in_five_minutes(labeller: Labeller) -> None:
    seconds = int(EVENT_SECONDS) - 20
    for second in range(seconds):
        kind = (A100, T4)[second % 2]
        labeller.store(node(features(kind), labelled("mine") if second == 0 else {}))
        labeller.now += 1
    assert labeller.label == "mine"
    assert len(labeller.events()) == 1


def test_a_product_that_flaps_never_changes_our_label(labeller: Labeller) -> None:
    for second in range(int(UNCHANGED_SECONDS) + 60):
        labeller.store(node(features((A100_PRODUCT, "Tesla-T4")[second % 2])))
        labeller.now += 1
    assert labeller.label == A100_PRODUCT
    assert labeller.api.calls.count("PATCH") == 1


def test_a_label_that_is_removed_every_second_is_written_once_a_minute(labeller: Labeller) -> None:
    for _ in range(int(REWRITE_SECONDS) * 2):
        labeller.api.store(PATH, node(hami(A100)))
        labeller.look(0.5)
        labeller.look(0.5)  # the watch has delivered the controller's own write
    assert labeller.api.calls.count("PATCH") in (2, 3)


def test_a_lasting_doubt_is_reported_once_an_hour(labeller: Labeller) -> None:
    labeller.store(BOTH)
    for _ in range(3):
        labeller.look(EVENT_SECONDS)
    assert labeller.api.calls.count("POST") == 1
    labeller.look(RENEWAL_SECONDS)
    assert labeller.api.calls.count("POST") == 2
    [message] = labeller.events()
    assert message.endswith(f"the quota uses model {A100_PRODUCT}")
    [event] = [each for path, each in labeller.api.objects.items() if "/events/" in path]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("Node", f"uid-of-{NAME}")
    assert event["type"] == "Warning"


def test_a_forbidden_write_is_not_repeated_on_every_node(labeller: Labeller) -> None:
    """If the admission policy has another label than --model-label, the API server rejects the write on every node."""
    labeller.api.deliver = rejected(ApiError(403, "this account changes of nodes …"), "PATCH")
    for number in range(20):
        labeller.api.store(f"/api/v1/nodes/n{number}", node(hami(A100), name=f"n{number}"))
    labeller.look()
    assert labeller.api.calls.count("PATCH") == 1
    labeller.api.deliver = delivered
    labeller.look(REST_SECONDS)
    labeller.look(REST_SECONDS)
    assert all(each["metadata"]["labels"] for path, each in labeller.api.objects.items() if "/nodes/n" in path)


def test_nothing_is_kept_of_a_deleted_node(labeller: Labeller) -> None:
    labeller.store(BOTH)
    labeller.api.remove(PATH)
    labeller.look()
    assert labeller.duty.counts() == ({}, {})


# Tests of the log messages about a quota for models that no node has


def test_a_cluster_without_any_model_is_reported_once_after_all_nodes_were_checked(labeller: Labeller) -> None:
    labeller.write_quota("team-a: {quota: {A100: 1, T4: 1}}")
    labeller.api.store(PATH, node())
    why = "no node has a GPU model, so pods that request GPUs stay pending"
    assert [warned(labeller, seconds) for seconds in (0, PERIOD_SECONDS, PERIOD_SECONDS)] == [[], [why], []]
    labeller.store(node(hami(A100)))
    labeller.look(PERIOD_SECONDS)
    labeller.api.remove(PATH)
    assert warned(labeller, PERIOD_SECONDS) == [why]


def test_a_model_of_the_quota_that_no_node_has_is_reported_with_the_nearest_name(labeller: Labeller) -> None:
    labeller.write_quota(f"team-a: {{quota: {{A100: 1, {T4_PRODUCT}: 1}}}}")
    labeller.api.store(PATH, node(hami(A100)))
    assert warned(labeller, 0) == []
    labeller.write_quota(f"team-a: {{quota: {{A100: 1, {A100_PRODUCT}: 1}}}}")
    near = f"no node has GPU model A100; did you mean {A100_PRODUCT}?"
    assert [warned(labeller, PERIOD_SECONDS), warned(labeller, PERIOD_SECONDS)] == [[near], []]


def warned(labeller: Labeller, seconds: float) -> list[str]:
    return [line["why"] for line in labeller.look(seconds) if line["event"] == "quota cannot be used"]
