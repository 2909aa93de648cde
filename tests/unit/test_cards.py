"""Tests of the GPU cards of a node, of the cards that pods request, and of the cards that allocations use."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.builders import Manifest, container, pod, sidecar, vcuda_pod, view
from tests.tables import cases
from vcuda.allocations.cards import (
    MAX_SHARES,
    CardRequest,
    Cards,
    ContainerRequest,
    PodCards,
    Share,
    Unplaceable,
    allocating,
    read_capacity,
    read_card_request,
    read_pod_cards,
)
from vcuda.requests.schemes import GPU_MANAGER, NVIDIA_VCUDA

CORES, MEMORY = GPU_MANAGER.cores, GPU_MANAGER.memory
OTHERS = {"nvidia.com/vcuda-core": "100", "nvidia.com/vcuda-memory": "16000"}


def four() -> Cards:
    return Cards.unused(GPU_MANAGER, 4, 4 * 64)


def test_memory_is_divided_evenly_in_whole_blocks() -> None:
    cards = read_capacity({CORES: "400", MEMORY: "67", "cpu": "64"})
    assert isinstance(cards, Cards)
    assert (len(cards.used_cores), cards.card_memory, cards.free_memory) == (4, 16 * 256, 67 * 256)


def test_nvidia_counts_memory_in_mebibytes() -> None:
    cards = read_capacity(OTHERS)
    assert cards == Cards.unused(NVIDIA_VCUDA, 1, 16000)
    assert isinstance(cards, Cards)
    assert cards.card_memory == 16000


@cases(
    "capacity, reason",
    no_GPU=({}, "the node has no vcuda cards"),
    device_plugin_gone=({CORES: "0", MEMORY: "0"}, "the node has no vcuda cards"),
    less_than_a_card=({CORES: "50", MEMORY: "8"}, f"{CORES} in the node's capacity must be 100 a card; got 50"),
    no_number=({CORES: "x", MEMORY: "8"}, f"{CORES} in the node's capacity must be 100 a card; got x"),
    too_many=({CORES: "1T", MEMORY: "8"}, f"{CORES} in the node's capacity must be 100 a card; got 1T"),
    no_memory=({CORES: "100"}, f"{MEMORY} is missing in the node's capacity"),
    memory_of_0=({CORES: "100", MEMORY: "0"}, f"{MEMORY} is missing in the node's capacity"),
    negative_memory=({CORES: "100", MEMORY: "-1"}, f"{MEMORY} is missing in the node's capacity"),
    two_schemes_the_same_cards_twice_perhaps=(
        {CORES: "100", MEMORY: "8", **OTHERS},
        f"the node has both {CORES} and nvidia.com/vcuda-core in its capacity",
    ),
)
def test_a_node_without_cards_is_a_permanent_reason(capacity: dict[str, Any], reason: str) -> None:
    assert read_capacity(capacity) == Unplaceable(reason, final=True)


def test_a_share_takes_cores_and_memory_and_a_whole_card_takes_all_of_it() -> None:
    cards = four().taken([Share(1, 30, 1024), Share(2, 100, 0)])
    assert (cards.used_cores, cards.used_memory) == ((0, 30, 100, 0), (0, 1024, 16384, 0))
    assert (cards.free_cores, cards.free_memory) == (270, 2 * 16384 + 16384 - 1024)
    assert [cards.free_of(card) for card in range(4)] == [(100, 16384), (70, 15360), (0, 0), (100, 16384)]
    assert cards.whole == 2


@pytest.mark.parametrize("card", [-1, 4, 10**9])
def test_a_share_of_a_card_that_the_node_does_not_have_is_ignored(card: int) -> None:
    assert four().taken([Share(card, 50, 1024), Share(0, 10, 256)]) == four().taken([Share(0, 10, 256)])


def test_an_overcommitted_card_has_nothing_free_until_all_shares_end() -> None:
    """gpu-admission ignores a share that does not fit, and so counts the card as free when the first share ends."""
    over = [Share(0, 80, 16000), Share(0, 50, 1000)]
    cards = four().taken(over)
    assert (cards.free_of(0), cards.free_cores, cards.free_memory) == ((0, 0), 300, 3 * 16384)
    assert cards.returned(over[:1]).free_of(0) == (50, 15384)
    assert cards.returned(over) == four()


SHARES = st.lists(
    st.builds(Share, st.integers(-1, 5), st.sampled_from([5, 30, 75, 100]), st.sampled_from([0, 256, 4096, 20000]))
)


@given(SHARES, SHARES)
def test_released_shares_become_free_and_the_sums_match_the_cards(kept: list[Share], gone: list[Share]) -> None:
    cards = four().taken(kept).taken(gone).returned(gone)
    assert cards == four().taken(kept)
    free = [cards.free_of(card) for card in range(4)]
    assert (cards.free_cores, cards.free_memory) == (sum(cores for cores, _ in free), sum(mib for _, mib in free))
    assert cards.whole == sum(map(cards.is_whole, range(4)))
    assert cards.most_cores == max(cores for cores, _ in free)


SHARE = {CORES: 30, MEMORY: 4}


def test_container_requests_are_read_in_order_with_the_numbers_of_their_containers() -> None:
    manifest = pod(container(SHARE), container(), container({CORES: "200", MEMORY: "1"}))
    assert read_card_request(view(manifest)) == CardRequest(
        GPU_MANAGER, (ContainerRequest(0, 30, 1024), ContainerRequest(2, 200, 256))
    )


def test_the_nvidia_scheme_requests_memory_in_mebibytes() -> None:
    request = read_card_request(view(vcuda_pod({"nvidia.com/vcuda-core": 10, "nvidia.com/vcuda-memory": 500})))
    assert request == CardRequest(NVIDIA_VCUDA, (ContainerRequest(0, 10, 500),))


@cases(
    "manifest",
    no_resources=pod(container()),
    another_vendors=vcuda_pod({"nvidia.com/gpu": 1}),
    none=vcuda_pod({CORES: 0, MEMORY: 0}),
    memory_alone=vcuda_pod({MEMORY: 4}),
    a_share_without_memory_which_gpu_manager_starts_on_no_card=vcuda_pod({CORES: 50}),
)
def test_a_pod_that_needs_no_card_by_number_may_go_anywhere(manifest: Manifest) -> None:
    assert read_card_request(view(manifest)) is None


@cases(
    "manifest, reason",
    init_container=(pod(container(SHARE), init=[container(SHARE)]), "init containers cannot get vcuda cards"),
    sidecar_alone=(pod(container(), init=[sidecar(SHARE)]), "init containers cannot get vcuda cards"),
    two_schemes=(
        pod(container(SHARE), container({"nvidia.com/vcuda-core": 100})),
        f"the pod requests both {CORES} and nvidia.com/vcuda-core",
    ),
    a_card_and_a_half=(
        vcuda_pod({CORES: 150}),
        "a request of more than 100 cores must be a multiple of 100, because it gets whole cards",
    ),
)
def test_a_request_that_no_node_can_serve_is_a_permanent_reason(manifest: Manifest, reason: str) -> None:
    assert read_card_request(view(manifest)) == Unplaceable(reason, final=True)


T = "tencent.com"
TWO_CARDS = {f"{T}/vcuda-core": 200}
WRITTEN = {f"{T}/predicate-node": "n1", f"{T}/predicate-gpu-idx-0": "3", f"{T}/predicate-gpu-idx-2": "0,5"}


def cards_by(annotations: dict[str, str], phase: str = "Pending", **spec: Any) -> PodCards | None:
    manifest = pod(container(SHARE), container(), container(TWO_CARDS), annotations=annotations, **spec)
    return read_pod_cards(view({**manifest, "status": {"phase": phase}}))


GIVEN = (Share(3, 30, 1024), Share(0, 100, 0), Share(5, 100, 0))


def test_an_allocation_is_written_as_gpu_manager_reads_it() -> None:
    written = allocating(GPU_MANAGER, "n1", {0: (Share(3, 30, 1024),), 2: (Share(0, 100, 0), Share(5, 100, 0))}, 7)
    assert written == {**WRITTEN, f"{T}/predicate-time": "7", f"{T}/gpu-assigned": "false"}
    assert cards_by(written) == PodCards("n1", GIVEN)


def test_the_nvidia_scheme_writes_its_own_annotations() -> None:
    written = allocating(NVIDIA_VCUDA, "n1", {0: (Share(1, 10, 500),)}, 7)
    assert {key.partition("/")[0] for key in written} == {"nvidia.com"}


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", "", "Succeeded", "Failed"])
def test_a_bound_pod_uses_cards_of_its_node_until_it_has_ended(phase: str) -> None:
    held = None if phase in ("Succeeded", "Failed") else PodCards("n2", GIVEN)
    assert cards_by(WRITTEN, phase, nodeName="n2") == held


def test_an_unbound_pod_uses_cards_of_the_chosen_node() -> None:
    assert cards_by(WRITTEN) == PodCards("n1", GIVEN)
    assert cards_by({f"{T}/predicate-gpu-idx-0": "3"}) is None


TEXTS = {"1, 2": [1, 2], "-1,2": [2], "x,2": [2], "2,\u0663": [2], "9" * 5000: [], "": [], "1,2,3,4": [1, 2]}


@pytest.mark.parametrize(("text", "cards"), TEXTS.items())
def test_text_that_is_no_card_number_is_skipped(text: str, cards: list[int]) -> None:
    """gpu-admission crashes on a negative number."""
    found = cards_by({f"{T}/predicate-gpu-idx-2": text}, nodeName="n1")
    assert [share.card for share in found.shares] == cards if found else cards == []


@pytest.mark.parametrize(("cores", "count"), [(30, 1), (99, 1), (100, 1), (199, 1), (7000, 70), (10**9, MAX_SHARES)])
def test_as_many_cards_are_read_as_the_container_requests(cores: int, count: int) -> None:
    """If more cards were read than the container requests, the pod's owner could occupy a node by an annotation."""
    limits = {f"{T}/vcuda-core": cores, f"{T}/vcuda-memory": 4}
    text = {f"{T}/predicate-gpu-idx-0": ",".join(map(str, range(2000)))}
    found = read_pod_cards(view(pod(container(limits), annotations=text, nodeName="n1")))
    assert found is not None
    assert [share.card for share in found.shares] == list(range(count))


def test_containers_with_equal_annotations_each_get_their_own_request() -> None:
    """The cache of parsed annotations must not mix up the requests of the containers."""
    words = {f"{T}/predicate-gpu-idx-{number}": "3" for number in range(2)}
    less = {f"{T}/vcuda-core": 10, f"{T}/vcuda-memory": 1}
    for first, second in ((SHARE, less), (less, SHARE)):
        found = read_pod_cards(view(pod(container(first), container(second), annotations=words, nodeName="n1")))
        assert found is not None
        by_request = {first[f"{T}/vcuda-core"]: found.shares[0], second[f"{T}/vcuda-core"]: found.shares[1]}
        assert by_request == {10: Share(3, 10, 256), 30: Share(3, 30, 1024)}


def test_an_annotation_of_a_container_without_a_request_hides_no_other() -> None:
    forged = {"tencent.com/predicate-gpu-idx-0": "1", "nvidia.com/predicate-gpu-idx-0": "2"}
    limits = {"nvidia.com/vcuda-core": 100}
    found = read_pod_cards(view(pod(container(limits), annotations=forged, nodeName="n1")))
    assert found == PodCards("n1", (Share(2, 100, 0),))
