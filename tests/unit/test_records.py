"""How a placement stands on a pod, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.builders import container, pod, view
from vcuda.allocations.cards import PodCards, Share, annotations_for, patch_of, read_pod_cards
from vcuda.requests.schemes import GPU_MANAGER, NVIDIA_VCUDA

T = "tencent.com"
SHARE = {f"{T}/vcuda-core": 30, f"{T}/vcuda-memory": 4}
TWO_CARDS = {f"{T}/vcuda-core": 200}
WRITTEN = {f"{T}/predicate-node": "n1", f"{T}/predicate-gpu-idx-0": "3", f"{T}/predicate-gpu-idx-2": "0,5"}


def holding(annotations: dict[str, str], phase: str = "Pending", **spec: Any) -> PodCards | None:
    manifest = pod(container(SHARE), container(), container(TWO_CARDS), annotations=annotations, **spec)
    return read_pod_cards(view({**manifest, "status": {"phase": phase}}))


SHARES = (Share(3, 30, 1024), Share(0, 100, 0), Share(5, 100, 0))


def test_what_is_written_is_what_gpu_manager_reads() -> None:
    written = annotations_for(GPU_MANAGER, "n1", {0: (Share(3, 30, 1024),), 2: (Share(0, 100, 0), Share(5, 100, 0))}, 7)
    assert written == {**WRITTEN, f"{T}/predicate-time": "7", f"{T}/gpu-assigned": "false"}
    assert holding(written) == PodCards("n1", SHARES)


def test_the_nvidia_scheme_has_its_own_names() -> None:
    written = annotations_for(NVIDIA_VCUDA, "n1", {0: (Share(1, 10, 500),)}, 7)
    assert {key.partition("/")[0] for key in written} == {"nvidia.com"}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_holds_nothing(phase: str) -> None:
    assert holding(WRITTEN, phase, nodeName="n1") is None


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", ""])
def test_a_bound_pod_holds_cards_of_its_node_whichever_was_chosen(phase: str) -> None:
    assert holding(WRITTEN, phase, nodeName="n2") == PodCards("n2", SHARES)


def test_a_pod_that_is_not_bound_holds_those_of_the_node_that_was_chosen() -> None:
    assert holding(WRITTEN) == PodCards("n1", SHARES)
    assert holding({f"{T}/predicate-gpu-idx-0": "3"}) is None


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("1,2", [1, 2]),
        ("1, 2", [1, 2]),
        ("-1,2", [2]),
        ("x,2", [2]),
        ("2,\u0663", [2]),
        ("9" * 5000, []),
        ("", []),
        ("1,2,3,4,5,6,7", [1, 2]),
    ],
)
def test_what_is_no_number_of_a_card_is_passed_over(text: str, cards: list[int]) -> None:
    """gpu-admission ends by a fault of its own at a negative number."""
    found = holding({f"{T}/predicate-gpu-idx-2": text}, nodeName="n1")
    assert [share.card for share in found.shares] == cards if found else cards == []


@pytest.mark.parametrize(("cores", "count"), [(30, 1), (99, 1), (100, 1), (199, 1), (7000, 70), (10**9, 1024)])
def test_no_more_cards_are_read_than_the_container_asks_for_and_no_fewer(cores: int, count: int) -> None:
    """The owner of a running pod can write all the cards of its node on it, which then nobody else would get."""
    limits = {f"{T}/vcuda-core": cores, f"{T}/vcuda-memory": 4}
    text = {f"{T}/predicate-gpu-idx-0": ",".join(map(str, range(2000)))}
    found = read_pod_cards(view(pod(container(limits), annotations=text, nodeName="n1")))
    assert found is not None
    assert [share.card for share in found.shares] == list(range(count))


def test_an_annotation_for_a_container_that_asks_for_nothing_hides_no_other() -> None:
    forged = {"tencent.com/predicate-gpu-idx-0": "1", "nvidia.com/predicate-gpu-idx-0": "2"}
    limits = {"nvidia.com/vcuda-core": 100}
    found = read_pod_cards(view(pod(container(limits), annotations=forged, nodeName="n1")))
    assert found == PodCards("n1", (Share(2, 100, 0),))


def test_the_patch_is_guarded_and_takes_away_what_an_earlier_placement_left() -> None:
    present = {f"{T}/predicate-gpu-idx-1": "9", "nvidia.com/predicate-node": "n0", "mine": "kept"}
    patch = json.loads(patch_of({f"{T}/predicate-node": "n1"}, present, "uid-1", "42"))
    assert patch == {
        "metadata": {
            "uid": "uid-1",
            "resourceVersion": "42",
            "annotations": {
                f"{T}/predicate-gpu-idx-1": None,
                "nvidia.com/predicate-node": None,
                f"{T}/predicate-node": "n1",
            },
        }
    }
