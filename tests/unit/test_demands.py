"""What a pod wants of its node's cards."""

from __future__ import annotations

import pytest

from tests.builders import Manifest, container, pod, sidecar, vcuda_pod, view
from vcuda.allocations.cards import CardRequest, ContainerRequest, Unplaceable, read_card_request
from vcuda.requests.schemes import GPU_MANAGER, NVIDIA_VCUDA

CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
SHARE = {CORES: 30, MEMORY: 4}


def test_containers_want_one_after_the_other_and_others_keep_their_number() -> None:
    manifest = pod(container(SHARE), container(), container({CORES: "200", MEMORY: "1"}))
    assert read_card_request(view(manifest)) == CardRequest(
        GPU_MANAGER, (ContainerRequest(0, 30, 1024), ContainerRequest(2, 200, 256))
    )


def test_the_nvidia_scheme_asks_in_mebibytes() -> None:
    request = read_card_request(view(vcuda_pod({"nvidia.com/vcuda-core": 10, "nvidia.com/vcuda-memory": 500})))
    assert request == CardRequest(NVIDIA_VCUDA, (ContainerRequest(0, 10, 500),))


@pytest.mark.parametrize(
    "manifest",
    [
        pytest.param(pod(container()), id="no resources"),
        pytest.param(vcuda_pod({"nvidia.com/gpu": 1}), id="another vendor's"),
        pytest.param(vcuda_pod({CORES: 0, MEMORY: 0}), id="none"),
        pytest.param(vcuda_pod({MEMORY: 4}), id="memory alone"),
        pytest.param(vcuda_pod({CORES: 50}), id="a share without memory, which gpu-manager starts on no card"),
    ],
)
def test_a_pod_that_needs_no_card_by_number_may_go_anywhere(manifest: Manifest) -> None:
    assert read_card_request(view(manifest)) is None


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        pytest.param(
            pod(container(SHARE), init=[container(SHARE)]),
            "init containers cannot get vcuda cards",
            id="init container",
        ),
        pytest.param(
            pod(container(), init=[sidecar(SHARE)]), "init containers cannot get vcuda cards", id="sidecar alone"
        ),
        pytest.param(
            pod(container(SHARE), container({"nvidia.com/vcuda-core": 100})),
            f"asks for both {CORES} and nvidia.com/vcuda-core",
            id="two schemes",
        ),
        pytest.param(vcuda_pod({CORES: 150}), "cores over 100 must be whole cards, 100 each", id="a card and a half"),
    ],
)
def test_what_no_node_can_serve_is_a_reason_that_lasts(manifest: Manifest, reason: str) -> None:
    assert read_card_request(view(manifest)) == Unplaceable(reason, final=True)
