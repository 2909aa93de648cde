"""Tests of how stored pods are counted: which of them use cards, of which model, and how many."""

from typing import Any

import pytest

from examples.allocations import NODE, RECORDED, allocated_pod, marks
from tests import builders
from tests.tables import cases
from vcuda.allocations.cards import MAX_SHARES, PodCards, Share
from vcuda.allocations.stored_pods import (
    MAX_KEYS_REMEMBERED,
    MAX_LIST_LENGTH,
    MAX_NODE_LENGTH,
    MAX_REMEMBERED_LENGTH,
    MAX_REQUESTS_REMEMBERED,
    MAX_WORDS_LENGTH,
    Allocation,
    RequestCache,
    StoredPod,
    charges_of,
    read_allocation,
    read_stored,
)
from vcuda.quota.model import Charge
from vcuda.requests.resources import BUILT_IN, MAX_PRODUCT
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme

CARD = Charge(100, 0, 100)
NODES = builders.nodes(**{"gpu-1": {builders.MODEL: "P100"}, "cpu-1": {}})


def stored(limits: dict[str, Any] = builders.ONE_CARD, phase: str | None = "Running", **spec: Any) -> builders.Manifest:
    metadata = {"uid": "uid-1", "namespace": "team-a", "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {} if phase is None else {"status": {"phase": phase}}
    return {**builders.vcuda_pod(limits, metadata=metadata, **spec), **status}


def kept(manifest: builders.Manifest) -> StoredPod:
    found = read_stored(builders.view(manifest), builders.LABELS)
    assert found is not None
    return found


def test_only_the_needed_fields_of_a_pod_are_kept() -> None:
    about: dict[str, Any] = {
        "uid": "uid-1",
        "namespace": "team-a",
        "name": "train-0",
        "created": "2026-01-01T00:00:00Z",
    }
    expected = StoredPod(model="M40", node="gpu-1", live=True, charge=CARD, **about)
    assert kept(stored(affinity=builders.held_to("M40"), nodeName="gpu-1")) == expected


def test_the_cards_that_its_annotations_give_it_are_kept_with_its_version() -> None:
    manifest = stored({"tencent.com/vcuda-core": 200}, nodeName="gpu-1")
    manifest["metadata"] |= {"resourceVersion": "7", "annotations": {"tencent.com/predicate-gpu-idx-0": "1,3"}}
    found = kept(manifest)
    assert (found.cards, found.version) == (PodCards("gpu-1", (Share(1, 100, 0), Share(3, 100, 0))), "7")


def test_requirements_added_to_a_gated_pod_do_not_remove_its_charge() -> None:
    """Users may add any number of requirements to a pod with scheduling gates (KEP-3838)."""
    added = builders.requirement("x", "NotIn", *(f"v{number}" for number in range(1000)))
    affinity = builders.required(builders.term(builders.requirement(builders.MODEL, "In", "M40"), added))
    assert kept(stored(affinity=affinity, schedulingGates=[{"name": "a/b"}])).model == "M40"


def test_a_mirror_pod_is_recognized() -> None:
    manifest = stored()
    manifest["metadata"] |= {"annotations": {"kubernetes.io/config.mirror": "hash"}}
    assert kept(manifest).mirror
    assert not kept(stored()).mirror


@pytest.mark.parametrize("limits", [{}, {"cpu": "1"}, {"nvidia.com/gpu": 0}])
def test_a_pod_without_vcuda_is_not_kept(limits: dict[str, Any]) -> None:
    assert read_stored(builders.view(stored(limits)), builders.LABELS) is None


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", "", None, "Succeeded", "Failed"])
def test_a_pod_uses_its_cards_until_it_has_ended(phase: str | None) -> None:
    assert kept(stored(phase=phase)).live is (phase not in ("Succeeded", "Failed"))


@cases(
    "spec, model",
    by_affinity=({"affinity": builders.held_to("M40")}, "M40"),
    by_nodeSelector=({"nodeSelector": {builders.MODEL: "M40"}}, "M40"),
    its_spec_not_its_nodes_label=({"affinity": builders.held_to("M40"), "nodeName": "gpu-1"}, "M40"),
    held_to_none_its_nodes=({"nodeName": "gpu-1"}, "P100"),
    a_node_without_the_label=({"nodeName": "cpu-1"}, None),
    a_node_that_is_not_known=({"nodeName": "gone"}, None),
    neither_held_nor_bound=({}, None),
)
def test_a_pod_is_charged_for_the_model_of_its_node_selection(spec: dict[str, Any], model: str | None) -> None:
    assert kept(stored(**spec)).model_on(NODES) == model
    charges = [(model, CARD)] if model else []
    assert list(charges_of([kept(stored(**spec))], NODES)) == charges


def test_an_annotation_does_not_determine_the_model() -> None:
    """A user may edit the model annotation of a stored pod."""
    assert kept(stored(annotations={"quota.vcuda.io/model": "M40"})).model is None


EACH = pytest.mark.parametrize("scheme", RECORDED, ids=lambda scheme: scheme.name)


def allocation_on(manifest: builders.Manifest) -> Allocation | None:
    return kept(manifest).allocation


@EACH
def test_the_schemes_annotations_and_labels_are_kept_and_no_others(scheme: Scheme) -> None:
    annotations, labels = marks(scheme, 1000, phase="done")
    own: dict[str, Any] = {"annotations": {"a/b": "c", f"{scheme.predicate_node}s": "d"}, "labels": {"app": "train"}}
    manifest = builders.view(allocated_pod(scheme, 1000, phase="done", **own))
    found = read_allocation(manifest, (scheme,), whole_keys=True)
    assert scheme.phase
    judged = {scheme.predicate_node, *scheme.predicate_times, scheme.phase.key}
    values = {key: value if key in judged else "" for key, value in annotations.items()}
    assert found == Allocation(values, labels, (scheme,))
    assert found.keys_of(scheme) == (tuple(annotations), tuple(labels))
    assert found.get(scheme.predicate_node) == NODE


@EACH
def test_nothing_is_kept_of_a_pod_without_an_allocation(scheme: Scheme) -> None:
    manifest = allocated_pod(scheme, 1000)
    manifest["metadata"] |= {"annotations": {"a/b": "c"}, "labels": {"app": "train"}}
    assert allocation_on(manifest) is None
    del manifest["metadata"]["annotations"], manifest["metadata"]["labels"]
    assert allocation_on(manifest) is None


@pytest.mark.parametrize("scheme", [NVIDIA_VCUDA, VGPU_MANAGER], ids=lambda scheme: scheme.name)
def test_a_key_of_two_vendors_belongs_to_the_one_that_the_pod_requests(scheme: Scheme) -> None:
    found = allocation_on(allocated_pod(scheme, 1000))
    assert found
    assert [each.name for each in found.schemes] == [scheme.name]


def test_an_empty_value_is_ignored() -> None:
    found = allocation_on(allocated_pod(GPU_MANAGER, 1000, node=""))
    assert found
    assert found.get("tencent.com/predicate-node") is None
    assert found.get(None) is None


def test_the_request_of_equal_pods_is_parsed_once_and_never_confused() -> None:
    """Pods with equal requests may differ in other fields, for example in the node selection of a gated pod."""
    cache = RequestCache(BUILT_IN, builders.LABELS)
    long = [{"name": "A", "value": "x" * MAX_REMEMBERED_LENGTH}]
    many = [{"tencent.com/vcuda-core": 100 * number} for number in range(1, MAX_REQUESTS_REMEMBERED + 2)]
    env = [{**builders.container(limits), "env": long} for limits in many[:2]]
    held: list[dict[str, Any]] = [{"affinity": builders.held_to("M40")}, {"affinity": builders.held_to("P100")}, {}]
    selected = [{"nodeSelector": {builders.MODEL: model}} for model in ("M40", "A100")]
    manifests = [*map(stored, [*many, *many[:2]]), *(stored(containers=[each]) for each in env)]
    manifests += [stored(many[0], "Pending", **spec) for spec in (*held, *selected)]
    for manifest in manifests:
        pod = builders.view(manifest)
        assert read_stored(pod, builders.LABELS, BUILT_IN, cache) == read_stored(pod, builders.LABELS)


# Tests of how many bytes of a stored pod the controller keeps


HUGE = 250_000
"""The size in bytes of the largest annotation in these tests. Kubernetes permits 256 KiB for all annotations."""


def size_of(pod: StoredPod) -> int:
    """Return how many bytes are kept of texts that a tenant can write. Each share of a card counts as 100 bytes."""
    found, cards = pod.allocation, pod.cards
    texts = [pod.model or "", pod.node, pod.extended_claim, cards.node if cards else ""]
    texts += [text for kept in (found.annotations, found.labels) for text in (*kept, *kept.values())] if found else []
    assert all(map(str.isascii, texts)), "Python keeps one byte per character only for ASCII texts"
    return sum(map(len, texts)) + 100 * len(cards.shares if cards else ())


ANNOTATIONS = sorted({name for scheme in SCHEMES for name in scheme.allocation_annotations})


@pytest.mark.parametrize("fill", ["x", "0,", "\U0001f4a9", ":", "9"], ids=["text", "cards", "wide", "colons", "digits"])
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_only_a_bounded_part_of_huge_pod_annotations_is_kept(name: str, fill: str) -> None:
    """In namespaces whose mode is not enforce, users can store pods with such annotations."""
    key = f"{name}0" if name.endswith("-") else name
    text = fill * (HUGE // len(fill.encode()))
    asked = {"tencent.com/vcuda-core": 10**9}
    found = kept(stored(asked, annotations={key: text}))
    assert found.allocation
    assert size_of(found) <= MAX_NODE_LENGTH + 100
    bound = kept(stored(asked, nodeName="gpu-1", annotations={key: text}))
    assert size_of(bound) <= MAX_WORDS_LENGTH + 200 + 100 * MAX_SHARES
    ended = kept(stored(asked, "Failed", nodeName="gpu-1", annotations={key: text}))
    assert size_of(ended) <= MAX_NODE_LENGTH + 100


def test_one_of_thousands_of_keys_with_a_schemes_prefix_is_kept_and_all_are_removed() -> None:
    keys = {f"{prefix}/predicate-gpu-idx-{n:x>60}": "" for prefix in ("tencent.com", "nvidia.com") for n in range(2000)}
    pod = builders.view(stored(annotations={**keys, "hami.io/vgpu-node": "a"}))
    found = read_stored(pod, builders.LABELS)
    whole = read_stored(pod, builders.LABELS, whole_keys=True)
    assert found
    assert found.allocation
    assert whole
    assert whole.allocation
    assert size_of(found) < 1000
    schemes = (GPU_MANAGER, NVIDIA_VCUDA, HAMI)
    assert found.allocation.schemes == whole.allocation.schemes == schemes
    removed = [key for scheme in schemes for key in whole.allocation.keys_of(scheme)[0]]
    assert sorted(removed) == sorted([*keys, "hami.io/vgpu-node"])


@pytest.mark.parametrize(
    ("annotations", "cut"),
    [
        ({"hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1000,30:;" * (MAX_LIST_LENGTH // 22)}, False),
        ({"hami.io/vgpu-devices-allocated": "x," * (MAX_LIST_LENGTH // 2 + 1)}, True),
        (
            {"hami.io/vgpu-devices-allocated": ",".join(f"GPU-{number}" for number in range(MAX_WORDS_LENGTH // 5))},
            True,
        ),
        ({"nvidia.com/real-allocated": "x" * HUGE}, True),
        ({"tencent.com/predicate-node": "x" * 253}, False),
        ({"tencent.com/predicate-node": "x" * HUGE}, True),
        ({"hami.io/vgpu-devices-to-allocate": "x" * HUGE}, False),
        ({"tencent.com/predicate-gpu-idx-0": ",".join(["0"] * MAX_SHARES)}, False),
        ({"tencent.com/predicate-gpu-idx-0": "0,1", "tencent.com/predicate-gpu-idx-1": "0"}, False),
    ],
)
def test_a_pod_with_cut_records_is_marked(annotations: dict[str, str], *, cut: bool) -> None:
    """A pod is marked only if its cut text is one that a rule reads."""
    limits = {"tencent.com/vcuda-core": 100 * MAX_SHARES}
    found = kept(stored(limits, nodeName="gpu-1", annotations=annotations))
    assert found.is_cut is cut
    assert found.charge == kept(stored(limits)).charge


def test_a_pod_with_more_shares_than_are_kept_keeps_the_first_and_is_marked() -> None:
    share = builders.container({"tencent.com/vcuda-core": 10, "tencent.com/vcuda-memory": 1})
    keys = {f"tencent.com/predicate-gpu-idx-{number}": "1" for number in range(MAX_SHARES + 1)}
    manifest = stored(containers=[share] * (MAX_SHARES + 1), nodeName="gpu-1", annotations=keys)
    found = kept(manifest)
    assert found.cards
    assert (len(found.cards.shares), found.is_cut) == (MAX_SHARES, True)


def test_a_longer_text_than_a_label_can_have_is_no_model() -> None:
    """The API server of Kubernetes 1.30 stores a pod with such a long text, but no node can have it as its model."""
    assert kept(stored(affinity=builders.held_to("M" * MAX_PRODUCT))).model == "M" * MAX_PRODUCT
    assert kept(stored(affinity=builders.held_to("M" * HUGE))).model is None
    assert kept(stored(affinity=builders.held_to("M" * HUGE), nodeName="gpu-1")).model_on(NODES) == "P100"


def test_the_owner_of_an_allocation_does_not_depend_on_the_number_of_keys() -> None:
    keys = {f"tencent.com/predicate-gpu-idx-{number}": "0" for number in range(2 * MAX_KEYS_REMEMBERED)}
    few = kept(stored_with(dict([*keys.items()][:2]))).allocation
    many = kept(stored_with(keys)).allocation
    assert few
    assert many
    assert few.schemes == many.schemes == (GPU_MANAGER,)


def stored_with(annotations: dict[str, str]) -> builders.Manifest:
    manifest = stored()
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
