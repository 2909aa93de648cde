"""Tests of the lists of pods by which the node agent decides: they are complete, and include static pods."""

import pytest

from controller.garbage.node.pods import ApiPods, PodListing, list_pods
from tests.integration.scripted import Answer, Script, item, page, status
from tests.tables import cases
from vcuda.errors import Gone, Unavailable, VcudaError
from vcuda.kube import Kube

NODE = "gpu-7"
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"
CARDS = {"resources": {"limits": {"cpu": "1", "tencent.com/vcuda-core": "50"}}}
NO_CARDS = {"resources": {"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}}


def mirror(
    name: str, *containers: object, namespace: str = "kube-system", static: str = STATIC, **spec: object
) -> dict[str, object]:
    pod = item(name, 1)
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    annotations = {"kubernetes.io/config.mirror": static}
    return {
        "metadata": {**metadata, "namespace": namespace, "annotations": annotations},
        "spec": {"containers": list(containers), **spec},
    }


def test_a_live_list_has_all_pods_of_the_node_and_is_consistent(kube: Kube, script: Script) -> None:
    script.answers.extend([page(7, item("a", 1), token="t"), page(7, mirror("b"))])
    assert list_pods(kube, NODE).uids == {"uid-a", "uid-b"}
    assert {request.params["fieldSelector"] for request in script.seen} == {f"spec.nodeName={NODE}"}
    assert "resourceVersion" not in script.seen[0].params


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize(
    ("second", "error"),
    [
        pytest.param(status(410, "The provided continue parameter is too old"), Gone, id="its token has expired"),
        pytest.param(status(500, "etcdserver: leader changed"), Unavailable, id="an error"),
        pytest.param(Answer({"kind": "Status"}), Unavailable, id="no list"),
        pytest.param(page(7, {"metadata": {"name": "b"}}), Unavailable, id="a pod without a uid"),
    ],
)
def test_a_list_whose_second_page_fails_is_not_used(
    kube: Kube, script: Script, second: Answer, error: type[VcudaError], *, live: bool
) -> None:
    script.answers.extend([page(7, item("a", 1), token="t"), second])
    with pytest.raises(error):
        ApiPods(kube, NODE)(live)


def test_a_live_list_is_reused_for_seconds_and_a_failure_is_not(kube: Kube, script: Script) -> None:
    now = [0.0]
    pods = ApiPods(kube, NODE, clock=lambda: now[0])
    script.answers.extend([page(7, item("a", 1)), status(500, "down"), page(9, item("b", 1))])
    assert pods(True).uids == pods(True).uids == {"uid-a"}
    now[0] = 6.0
    with pytest.raises(Unavailable):
        pods(True)
    assert pods(True).uids == {"uid-b"}


def test_a_live_list_is_not_reused_in_the_next_sweep(kube: Kube, script: Script) -> None:
    """The next sweep may find a directory of a pod that was created after the LIST."""
    pods = ApiPods(kube, NODE, clock=lambda: 0.0)
    script.answers.extend([page(7, item("a", 1)), page(7, item("a", 1)), page(8, item("b", 1))])
    assert pods(True).uids == pods(False).uids == {"uid-a"}
    assert pods(True).uids == {"uid-b"}


def test_the_first_list_of_a_sweep_comes_from_the_cache_of_the_api_server(kube: Kube, script: Script) -> None:
    """A consistent LIST in pages reads the pods of all nodes from etcd, which the first LIST must not do."""
    script.answers.extend([page(7, item("a", 1)), page(8, item("b", 1))])
    pods = ApiPods(kube, NODE)
    assert [pods(False).uids, pods(False).uids] == [{"uid-a"}, {"uid-b"}]
    assert [request.params["resourceVersion"] for request in script.seen] == ["0", "0"]


def test_pods_that_are_too_large_for_one_page_are_listed_in_pages(
    kube: Kube, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LIST from the API server's cache has only one page. So the agent makes a consistent LIST instead."""
    monkeypatch.setattr("vcuda.kube.pages.MAX_PAGE_BYTES", 1000)
    monkeypatch.setattr("vcuda.kube.pages.MAX_OBJECT_BYTES", 1000)
    large = page(7, *(item(f"{number}-{'x' * 100}", 1) for number in range(10)))
    script.answers.extend([*[large] * 4, page(7, item("a", 1))])
    assert ApiPods(kube, NODE)(False).uids == {"uid-a"}
    assert [request.params.get("resourceVersion") for request in script.seen] == [*["0"] * 4, None]


@cases(
    "mirrors, expected",
    no_mirror_pod=([item("a", 1)], {}),
    no_cards=([mirror("a", NO_CARDS, {})], {STATIC: False}),
    cards=([mirror("a", NO_CARDS, CARDS)], {STATIC: True}),
    cards_of_an_init_container=([mirror("a", NO_CARDS, initContainers=[CARDS])], {STATIC: True}),
    a_namespace_where_tenants_create_pods=([mirror("a", NO_CARDS, namespace="team-a")], {STATIC: True}),
    two_mirror_pods_of_which_one_has_cards=([mirror("a", CARDS), mirror("b", NO_CARDS)], {STATIC: True}),
)
def test_a_static_pod_has_no_cards_only_if_its_mirror_pods_in_kube_system_say_so(
    kube: Kube, script: Script, mirrors: list[dict[str, object]], expected: dict[str, bool]
) -> None:
    script.answers.append(page(7, *mirrors))
    assert list_pods(kube, NODE).statics == expected


def test_an_annotation_that_cannot_be_a_uid_is_not_kept(kube: Kube, script: Script) -> None:
    script.answers.append(page(7, mirror("a", static="x" * 100_000), mirror("b")))
    assert list_pods(kube, NODE).statics.keys() == {STATIC}


@cases(
    "statics, uid, expected",
    without_a_mirror_pod=({}, STATIC, True),
    a_deleted_pod=({}, "00000000-0000-4000-8000-000000000001", False),
    with_cards=({STATIC: True}, STATIC, True),
    without_cards=({STATIC: False}, STATIC, False),
)
def test_a_pod_that_only_kubelet_has_may_be_a_static_pod_with_cards(
    statics: dict[str, bool], uid: str, *, expected: bool
) -> None:
    assert PodListing(frozenset(), statics).may_have_cards(uid) == expected
