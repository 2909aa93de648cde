"""Tests of how the GPU model of a node is decided, of doubts about it, and of who wrote the model label."""

from collections.abc import Iterable
from typing import Any

import msgspec

from examples import claims
from examples.discovery import (
    A100,
    A100_PRODUCT,
    DELETED,
    NAME,
    REQUESTING,
    T4,
    T4_PRODUCT,
    features,
    found_on,
    hami,
    known_by,
    labelled,
    node,
    vgpu_manager,
)
from tests.builders import MODEL, Manifest
from tests.tables import cases
from vcuda.claims.devices import read_slice
from vcuda.claims.objects import ResourceSlice
from vcuda.discovery.discovered import Doubt, Found, Record
from vcuda.discovery.sources import published_cards
from vcuda.k8s_types import Node
from vcuda.placement.device_plugins import outdated_registers, read_facts
from vcuda.placement.registers import read_registers
from vcuda.quota.model import Charge
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.schemes import HAMI, SCHEMES

M40_PRODUCT = "NVIDIA-Tesla-M40-24GB"
CARD = claims.slice_of(claims.NVIDIA, NAME, claims.device(claims.M40))
ROWS = known_by("{A100: [NVIDIA-A100-*GB], T4: [NVIDIA-Tesla-T4, Tesla-T4-SHARED], M40: [NVIDIA-Tesla-M40-*]}")


def wanted(found: Found) -> tuple[str, str] | None:
    return (found.wanted.model, found.wanted.source) if found.wanted else None


# Tests of the sources that name the GPU model of a node

BY_LABELS = (T4_PRODUCT, "gpu-feature-discovery")


@cases(
    "manifest, slices, expected",
    register_before_slices=(node(hami(A100), features(T4)), [CARD], (A100_PRODUCT, "hami")),
    vgpu_manager=(node(vgpu_manager(T4), features(A100)), [], (T4_PRODUCT, "vgpu-manager")),
    slices_before_labels=(node(features(T4)), [CARD], (M40_PRODUCT, "resourceslices")),
    labels=(node(features("Tesla-T4")), [], BY_LABELS),
    dead_by_handshake=(node(hami(A100, handshake=DELETED), features(T4)), [], BY_LABELS),
    dead_by_kubelet=(node(vgpu_manager(A100, offered="0"), features(T4)), [], BY_LABELS),
    never_alive=(node(vgpu_manager(A100, offered=None), features(T4)), [], BY_LABELS),
    alive_by_handshake=(node(hami(A100, offered=None), labels={}), [], (A100_PRODUCT, "hami")),
    alive_while_asked=(node(hami(A100, handshake=REQUESTING, offered=None)), [], (A100_PRODUCT, "hami")),
    alive_by_kubelet=(node(hami(A100, handshake="")), [], (A100_PRODUCT, "hami")),
    no_cards_in_the_register=(node(hami(), features("Tesla-T4")), [], BY_LABELS),
    most_cards=(node(hami(A100, T4, T4)), [], (T4_PRODUCT, "hami")),
    no_source=(node(labels={"a/b": "c"}), [], None),
)
def test_the_strongest_live_source_determines_the_model(
    manifest: Manifest, slices: list[ResourceSlice], expected: tuple[str, str] | None
) -> None:
    assert wanted(found_on(manifest, slices)) == expected


UNREADABLE = {"annotations": {str(HAMI.register): "[no"}, "allocatable": {"nvidia.com/gpu": "20"}}
MIG = node({**features(A100_PRODUCT, count="8"), "allocatable": {"nvidia.com/mig-1g.5gb": "56"}})
SHARED = known_by("{T4-shared: {products: [Tesla-T4-*], cards: 0.25}}")


@cases(
    "manifest, slices, cards",
    gpu_manager=(node({"allocatable": {"tencent.com/vcuda-core": "800"}}), [], 8),
    a_fork_of_gpu_manager=(node({"allocatable": {"nvidia.com/vcuda-core": "250"}}), [], 2.5),
    vgpu_manager=(node(vgpu_manager(T4, T4)), [], 2),
    HAMi_by_its_register=(node(hami(A100, A100, offered="20")), [], 2),
    HAMi_unreadable=(
        node({"annotations": {str(HAMI.register): "[no"}, "allocatable": {"nvidia.com/gpu": "20"}}),
        [],
        None,
    ),
    NVIDIAs_own_plugin=(node({"allocatable": {"nvidia.com/gpu": "4"}}), [], 4),
    one_of_two_plugins_offers_nothing=(
        node({"allocatable": {"tencent.com/vcuda-core": "0", "nvidia.com/gpu": "1"}}),
        [],
        1,
    ),
    MIG_devices=(MIG, [], 8),
    only_MIG_slices=(node(labelled("A30"), {"allocatable": {"nvidia.com/mig-2g.12gb": "4"}}), [], 2),
    a_DRA_driver=(node(), [CARD], 1),
    only_a_number_of_vGPUs=(node({"allocatable": {"nvidia.com/vgpu-number": "40"}}), [], None),
    none=(node({"allocatable": {"cpu": "64"}}), [], None),
)
def test_the_cards_of_a_node_are_counted_by_its_strongest_source_or_its_resources(
    manifest: Manifest, slices: list[ResourceSlice], cards: float | None
) -> None:
    assert cards_on(manifest, slices) == cards


def test_devices_that_are_parts_of_cards_are_counted_as_parts() -> None:
    """With NVIDIA's own device plugin, a device may be a part of a card, here a quarter of a card."""
    for model, cards in (("T4-shared", 1), ("T4", 4)):
        assert cards_on(node(labelled(model), {"allocatable": {"nvidia.com/gpu": "4"}}), known=SHARED) == cards


def cards_on(manifest: Manifest, slices: Iterable[ResourceSlice] = (), known: GpuResources = BUILT_IN) -> float | None:
    read = msgspec.convert(manifest, Node)
    facts = read_facts(read, known, read_registers(read.annotations, lambda *_: None))
    published = published_cards(map(read_slice, slices)).get(read.metadata.name, {})
    return found_on(manifest, slices, known).cards(facts, known, published)


HANDSHAKE, REGISTER = str(HAMI.handshake), str(HAMI.register)
REMOVE = f"If HAMi does not run on the node, remove annotation {REGISTER}"
SILENT = (
    f"annotation {HANDSHAKE} says that the device plugin of HAMi does not answer, but the node offers %s "
    f"nvidia.com/gpu. {REMOVE}, otherwise {HANDSHAKE}"
)
LISTED = f"the register of HAMi lists 2 cards of 20 nvidia.com/gpu, but the node offers 2. {REMOVE}"


@cases(
    "plugin, left_over, told",
    another_plugin_offers_each_card_once=(hami(A100, A100, handshake=DELETED, offered="2"), {"hami"}, None),
    hamis_plugin_offers_its_devices=(hami(A100, A100, handshake=DELETED, offered="20"), set(), SILENT % 20),
    fewer_devices_are_healthy=(hami(A100, A100, handshake=DELETED, offered="10"), set(), SILENT % 10),
    hami_does_not_divide_the_cards=(hami(A100, handshake=DELETED, offered="1", count=1), set(), SILENT % 1),
    nothing_offers_the_resource=(hami(A100, handshake=DELETED, offered="0"), set(), None),
    the_plugin_answers=(hami(A100, A100, offered="20"), set(), None),
    the_plugin_answers_and_another_has_its_resource=(hami(A100, A100, offered="2"), set(), LISTED),
    no_register=({"allocatable": {"nvidia.com/gpu": "8"}, "annotations": {HANDSHAKE: DELETED}}, set(), None),
)
def test_a_register_is_left_over_only_if_another_plugin_offers_each_of_its_cards_once(
    plugin: dict[str, Any], left_over: set[str], told: str | None
) -> None:
    """HAMi's register counts while HAMi's plugin offers the cards, even if HAMi's scheduler calls the plugin dead."""
    manifest = node(plugin, labelled("A100"))
    seen = msgspec.convert(manifest, Node)
    registers = read_registers(seen.annotations, lambda *_: None)
    assert outdated_registers(BUILT_IN, read_facts(seen, BUILT_IN, registers), registers) == left_over
    found = found_on(manifest).doubts.get(Doubt.CONTRADICTED)
    assert found == (told and f"{told}; the quota uses model A100")


@cases(
    "labels, model",
    gke=({"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}, "T4"),
    gke_of_today=({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, "H100"),
    eks_auto_mode=({"eks.amazonaws.com/instance-gpu-name": "t4"}, "T4"),
    karpenter_on_aws=({"karpenter.k8s.aws/instance-gpu-name": "a10g"}, "NVIDIA-A10G"),
    karpenter_on_azure=({"karpenter.azure.com/sku-gpu-name": "A100"}, "A100"),
    the_vendor_is_named=(
        {"karpenter.k8s.aws/instance-gpu-name": "h100", "karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"},
        "H100",
    ),
    another_vendor=(
        {
            "karpenter.k8s.aws/instance-gpu-name": "radeon-pro-v520",
            "karpenter.k8s.aws/instance-gpu-manufacturer": "amd",
        },
        None,
    ),
    nothing=({"cloud.google.com/gke-accelerator": ""}, None),
)
def test_the_label_of_a_cloud_names_the_model_if_no_other_source_does(
    labels: dict[str, str], model: str | None
) -> None:
    known = known_by("{A100: [NVIDIA-A100-*GB], T4: [Tesla-T4], H100: [NVIDIA-H100-*]}")
    assert wanted(found_on(node(labels=labels), known=known)) == (model and (model, "cloud-label"))
    for other in (hami("NVIDIA B200"), features("NVIDIA-B200"), labelled("B200"), labelled("B200", by="hami")):
        found = found_on(node(other, labels=labels), known=known)
        assert (found.wanted and found.wanted.source) != "cloud-label"
        assert found.doubts == {}


def test_a_label_by_the_cloud_is_confirmed_by_a_better_source() -> None:
    manifest = node(labelled("T4", by="cloud-label"), labels={"eks.amazonaws.com/instance-gpu-name": "t4"})
    assert found_on(manifest, known=ROWS).confirmed is None
    manifest["metadata"]["labels"]["nvidia.com/gpu.product"] = "Tesla-T4"
    found = found_on(manifest, known=ROWS)
    assert (found.doubts, found.confirmed) == ({}, Record("T4", "gpu-feature-discovery"))


NO_MODEL = f"but no source names its GPU model. Set label {MODEL} of the node to its GPU model"


@cases(
    "manifest, told",
    cards=(node({"allocatable": {"nvidia.com/gpu": "8"}}), f"the node offers nvidia.com/gpu, {NO_MODEL}"),
    mig_slices_and_a_unit=(
        node({"allocatable": {"nvidia.com/mig-1g.5gb": "7", "amd.com/gpu": "8"}}),
        f"the node offers amd.com/gpu, nvidia.com/mig-1g.5gb, {NO_MODEL}",
    ),
    no_gpu=(node({"allocatable": {"cpu": "8", "nvidia.com/gpu": "0"}}), None),
    a_source=(node(features("Tesla-T4")), None),
    a_label=(node({"allocatable": {"nvidia.com/gpu": "8"}}, labelled("A100")), None),
    a_label_without_a_model=(node({"allocatable": {"nvidia.com/gpu": "8"}}, labelled("")), None),
)
def test_a_node_that_offers_a_gpu_and_has_no_model_is_reported(manifest: Manifest, told: str | None) -> None:
    known = msgspec.structs.replace(BUILT_IN, own_units={"amd.com/gpu": Charge(100)})
    assert found_on(manifest, known=known).doubts == ({Doubt.NO_MODEL: told} if told else {})


def test_a_renamed_resource_of_a_plugin_shows_that_it_is_alive() -> None:
    renamed = msgspec.structs.replace(HAMI, count="nvidia.com/vgpu")
    known = known_by(schemes=tuple(renamed if each is HAMI else each for each in SCHEMES))
    plugin = hami(A100, handshake="", offered=None) | {"allocatable": {"nvidia.com/vgpu": "10"}}
    assert wanted(found_on(node(plugin), known=known)) == (A100_PRODUCT, "hami")
    assert wanted(found_on(node(hami(A100, handshake="")), known=known)) is None


def test_the_rows_of_the_quota_name_the_model_of_every_source() -> None:
    for part in (hami("NVIDIA-NVIDIA A100-SXM4-40GB"), vgpu_manager(A100), features(A100_PRODUCT)):
        found = found_on(node(part), known=ROWS)
        assert found.wanted
        assert found.wanted.model == "A100"
    assert wanted(found_on(node(), [CARD], ROWS)) == ("M40", "resourceslices")


# Tests of models from ResourceSlices


def pool(generation: int, of: int, *devices: Manifest, number: int = 0) -> ResourceSlice:
    made = claims.slice_of(claims.NVIDIA, NAME, *devices, generation=generation)
    metadata = msgspec.structs.replace(made.metadata, name=f"{generation}-{number}")
    counted = msgspec.structs.replace(made.spec.pool, resource_slice_count=of)
    return msgspec.structs.replace(made, metadata=metadata, spec=msgspec.structs.replace(made.spec, pool=counted))


OLD, NEW = claims.device(claims.M40), claims.device(claims.A100)


@cases(
    "slices, product",
    the_newest=([pool(1, 1, OLD), pool(2, 1, NEW)], A100_PRODUCT),
    the_newest_that_is_complete=([pool(1, 1, OLD), pool(2, 2, NEW)], M40_PRODUCT),
    of_two_slices=([pool(1, 1, OLD), pool(2, 2, NEW), pool(2, 2, number=1)], A100_PRODUCT),
    none_is_complete=([pool(2, 2, NEW)], None),
    of_another_node=([claims.slice_of(claims.NVIDIA, "gpu-2", NEW)], None),
    of_no_node=([claims.slice_of(claims.NVIDIA, "", NEW)], None),
    of_an_unknown_driver=([claims.slice_of("acme.com", NAME, NEW)], None),
    hami=([claims.slice_of(claims.HAMI, NAME, claims.shared(claims.A100, "hami-gpu"))], A100_PRODUCT),
    vgpu_manager=([claims.slice_of(claims.VGPU_MANAGER, NAME, claims.shared(claims.M40, "vgpu"))], M40_PRODUCT),
    slices_of_cards_beside_cards=(
        [claims.slice_of(claims.NVIDIA, NAME, OLD, *(claims.device(claims.A100, "mig", name=f"m{n}") for n in (1, 2)))],
        M40_PRODUCT,
    ),
    slices_of_cards_alone=([claims.slice_of(claims.NVIDIA, NAME, claims.device(claims.A100, "mig"))], A100_PRODUCT),
    not_for_containers=([claims.slice_of(claims.NVIDIA, NAME, claims.device(claims.A100, "vfio"))], None),
)
def test_the_newest_complete_generation_of_a_pool_names_the_cards_of_its_node(
    slices: list[ResourceSlice], product: str | None
) -> None:
    found = found_on(node(), slices)
    assert wanted(found) == (None if product is None else (product, "resourceslices"))
    assert [[*each.cards] for each in found.seen] == ([] if product is None else [[product]])


def test_cards_that_two_drivers_publish_count_once() -> None:
    cards = [claims.device(claims.A100, name=f"gpu-{n}") for n in range(3)]
    others = [claims.shared(claims.A100, "hami-gpu", name=f"gpu-{n}") for n in range(4)]
    [seen] = found_on(
        node(), [claims.slice_of(claims.NVIDIA, NAME, *cards), claims.slice_of(claims.HAMI, NAME, *others)]
    ).seen
    assert (seen.cards, seen.memory) == ({A100_PRODUCT: 4}, 40960)


# Tests of the number of a node's cards, and of their memory


MIG_PRODUCT = f"{A100_PRODUCT}-MIG-1g.5gb"


@cases(
    "part, cards, memory",
    register=(hami(A100, A100, memory=20000), {A100_PRODUCT: 2}, 20000),
    vgpu_manager=(vgpu_manager(T4), {T4_PRODUCT: 1}, 16384),
    labels=(features("Tesla-T4", count="4"), {T4_PRODUCT: 4}, 15360),
    shared=(features("Tesla-T4-SHARED", count="4"), {f"{T4_PRODUCT}-SHARED": 4}, 15360),
    slices_of_a_card=(features(MIG_PRODUCT, count="7", memory="4864"), {MIG_PRODUCT: 0}, 4864),
    no_figures=(features(A100_PRODUCT, count="x", memory="-1"), {A100_PRODUCT: 0}, 0),
    absurd_figures=(features(A100_PRODUCT, count="9" * 60, memory="٣"), {A100_PRODUCT: 0}, 0),
)
def test_cards_and_the_memory_of_the_smallest_are_as_the_source_says(part: Any, cards: Any, memory: int) -> None:
    [seen] = found_on(node(part)).seen
    assert (seen.cards, seen.memory) == (cards, memory)
