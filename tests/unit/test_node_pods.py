"""Tests of the file with a list of pods. A pod that is missing in the list would lose its directory."""

import json
from typing import Any

import pytest

from controller.garbage.node.pods import read_pods
from tests.tables import cases
from vcuda.errors import BadInput

NODE = "gpu-7"
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"

Json = dict[str, Any]


def pod(uid: str = "uid-1", node: str = NODE, namespace: str = "team-a", **metadata: object) -> Json:
    about = {"name": "train", "namespace": namespace, "uid": uid, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": {"nodeName": node}}


def listed(*pods: Json, kind: str = "List", **metadata: object) -> bytes:
    return json.dumps({"apiVersion": "v1", "kind": kind, "metadata": metadata, "items": pods}).encode()


def without_kind(found: Json) -> Json:
    """Return the pod as an item of a PodList. Such an item has no kind."""
    return {"metadata": found["metadata"], "spec": found["spec"], "status": {"phase": "Failed"}}


@cases(
    "text",
    printed_by_kubectl=listed(pod("a"), pod("b", "another"), pod("c", "")),
    printed_by_the_API_server=listed(*map(without_kind, map(pod, "abc")), kind="PodList"),
    with_a_resourceVersion=listed(pod("a"), pod("b"), pod("c"), resourceVersion="7", selfLink=""),
)
def test_every_pod_counts_on_any_node_in_any_phase(text: bytes) -> None:
    assert read_pods(text, NODE).uids == {"a", "b", "c"}


def test_a_mirror_pod_also_represents_its_static_pod() -> None:
    mirror = pod("a", annotations={"kubernetes.io/config.mirror": STATIC})
    assert read_pods(listed(mirror), NODE).uids == {"a", STATIC}


@cases(
    "pods, warns",
    pods_of_two_namespaces=([pod("a"), pod("b", namespace="kube-system")], False),
    pods_of_one_namespace=([pod("a"), pod("b")], True),
)
def test_a_list_of_one_namespace_gives_a_warning(pods: list[Json], *, warns: bool) -> None:
    assert bool(read_pods(listed(*pods), NODE).warning) == warns


NO_LISTS = [
    pytest.param(b"", id="empty"),
    pytest.param(listed(pod())[:-20], id="cut short"),
    pytest.param(listed(pod()) + b"}", id="with more text after the list"),
    pytest.param(b"[]", id="an array"),
    pytest.param(json.dumps(pod()).encode(), id="one pod"),
    pytest.param(b'{"kind": "List"}', id="no items"),
    pytest.param(b'{"kind": "List", "items": null}', id="null items"),
    pytest.param(listed({"kind": "Pod", "metadata": {}, "spec": {}}), id="a pod without a uid"),
    pytest.param(listed(pod(), {**pod(), "kind": "Node"}), id="other objects in the list"),
    pytest.param(listed(kind="NodeList"), id="a list of other objects"),
    pytest.param(listed(pod())[:-5] + b"\xff\xff\xff\xff\xff", id="not UTF-8"),
    pytest.param(b"[" * 100_000, id="nested very deeply"),
]


@pytest.mark.parametrize("text", NO_LISTS)
def test_an_incomplete_list_of_pods_is_rejected(text: bytes) -> None:
    for node in (None, NODE):
        with pytest.raises(BadInput, match="must be a complete list of pods"):
            read_pods(text, node)


@pytest.mark.parametrize("metadata", [{"continue": "token"}, {"remainingItemCount": 3}], ids=str)
def test_one_page_of_a_list_is_rejected_even_with_the_flag(metadata: Json) -> None:
    for node in (None, NODE):
        with pytest.raises(BadInput, match="only one page of a list of pods"):
            read_pods(listed(pod(), **metadata), node)


@pytest.mark.parametrize("text", [listed(), listed(pod(node="another"))], ids=["empty", "another node's"])
def test_a_list_without_a_pod_of_the_node_is_rejected_without_the_flag(text: bytes) -> None:
    with pytest.raises(BadInput, match="No pod in the file is on node 'gpu-7'"):
        read_pods(text, NODE)
    assert read_pods(text, None).warning is None
