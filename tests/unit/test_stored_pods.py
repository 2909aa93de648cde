"""Stored pods as the ledger counts them: which hold cards, of which model, and how much."""

from typing import Any

import pytest

from tests import builders
from tests.allocated import NODE, allocated_pod, marks
from tests.tables import cases
from vcuda.allocations.cards import PodCards, Share
from vcuda.allocations.stored_pods import (
    LONGEST_REMEMBERED,
    MOST_KEYS_REMEMBERED,
    MOST_REQUESTS_REMEMBERED,
    Allocation,
    Keys,
    RequestCache,
    StoredPod,
    charges_of,
    read_stored,
)
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.resources import BUILT_IN
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme, is_named

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


def test_what_is_kept_of_a_pod() -> None:
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


def test_what_is_added_to_a_pod_behind_a_scheduling_gate_does_not_take_its_charge_away() -> None:
    """Kubernetes lets requirements be added to it, as many as its owner likes (KEP-3838)."""
    added = builders.requirement("x", "NotIn", *(f"v{number}" for number in range(1000)))
    affinity = builders.required(builders.term(builders.requirement(builders.MODEL, "In", "M40"), added))
    assert kept(stored(affinity=affinity, schedulingGates=[{"name": "a/b"}])).model == "M40"


def test_a_pod_that_shows_a_static_one_is_known() -> None:
    manifest = stored()
    manifest["metadata"] |= {"annotations": {"kubernetes.io/config.mirror": "hash"}}
    assert kept(manifest).mirror
    assert not kept(stored()).mirror


@pytest.mark.parametrize("limits", [{}, {"cpu": "1"}, {"nvidia.com/gpu": 0}])
def test_a_pod_without_vcuda_is_not_kept(limits: dict[str, Any]) -> None:
    assert read_stored(builders.view(stored(limits)), builders.LABELS) is None


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", "", None, "Succeeded", "Failed"])
def test_a_pod_holds_its_cards_until_it_has_ended(phase: str | None) -> None:
    assert kept(stored(phase=phase)).live is (phase not in ("Succeeded", "Failed"))


def test_a_terminating_pod_still_holds_its_cards() -> None:
    manifest = stored()
    manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert kept(manifest).live


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
def test_the_model_it_is_charged_to(spec: dict[str, Any], model: str | None) -> None:
    assert kept(stored(**spec)).model_on(NODES) == model
    charges = [(model, CARD)] if model else []
    assert list(charges_of([kept(stored(**spec))], NODES)) == charges


def test_an_annotation_says_nothing_about_the_model() -> None:
    """Anybody may edit it."""
    assert kept(stored(annotations={"quota.vcuda.io/model": "M40"})).model is None


def test_only_live_pods_are_charged() -> None:
    pods = [kept(stored(phase=phase, affinity=builders.held_to("M40"))) for phase in ("Running", "Failed", "Pending")]
    assert list(charges_of(pods, Nodes(builders.LABELS))) == [("M40", CARD)] * 2


EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def allocation_on(manifest: builders.Manifest) -> Allocation | None:
    return kept(manifest).allocation


@EACH
def test_what_the_rules_read_is_part_of_the_allocation(scheme: Scheme) -> None:
    """It is removed with the rest; what stayed would be read again."""
    assert scheme.predicate_node
    assert scheme.predicate_times
    assert scheme.phase
    read = (scheme.predicate_node, *scheme.predicate_times, scheme.phase.key)
    assert all(is_named(key, (*scheme.allocation_annotations, *scheme.allocation_labels)) for key in read)


@EACH
def test_the_schemes_annotations_and_labels_are_kept_and_no_others(scheme: Scheme) -> None:
    annotations, labels = marks(scheme, 1000, phase="done")
    own: dict[str, Any] = {"annotations": {"a/b": "c", f"{scheme.predicate_node}s": "d"}, "labels": {"app": "train"}}
    found = allocation_on(allocated_pod(scheme, 1000, phase="done", **own))
    assert found == Allocation(annotations, labels, (scheme,))
    assert found.keys_of(scheme) == Keys(tuple(annotations), tuple(labels))
    assert found.get(scheme.predicate_node) == NODE


@EACH
def test_nothing_is_kept_of_a_pod_without_one(scheme: Scheme) -> None:
    manifest = allocated_pod(scheme, 1000)
    manifest["metadata"] |= {"annotations": {"a/b": "c"}, "labels": {"app": "train"}}
    assert allocation_on(manifest) is None
    del manifest["metadata"]["annotations"], manifest["metadata"]["labels"]
    assert allocation_on(manifest) is None


@pytest.mark.parametrize("scheme", [NVIDIA_VCUDA, VGPU_MANAGER], ids=lambda scheme: scheme.name)
def test_what_two_vendors_write_under_one_name_belongs_to_the_one_that_the_pod_asks(scheme: Scheme) -> None:
    found = allocation_on(allocated_pod(scheme, 1000))
    assert found
    assert [each.name for each in found.schemes] == [scheme.name]


def test_a_pod_may_carry_what_another_scheme_has_written_too() -> None:
    """Its manifest was copied, or it asks by both; each of the two is judged by its own."""
    foreign, _ = marks(HAMI, 1000)
    found = allocation_on(allocated_pod(GPU_MANAGER, 1000, annotations=foreign))
    assert found
    assert [scheme.name for scheme in found.schemes] == ["gpu-manager", "hami"]
    assert found.keys_of(HAMI).annotations == tuple(foreign)
    assert not set(found.keys_of(GPU_MANAGER).annotations) & set(foreign)
    assert found.keys_of(VGPU_MANAGER) == Keys((), ())


def test_an_empty_value_tells_nothing() -> None:
    found = allocation_on(allocated_pod(GPU_MANAGER, 1000, node=""))
    assert found
    assert found.get("tencent.com/predicate-node") is None
    assert found.get(None) is None


def test_what_a_pod_asks_for_and_where_is_read_once_for_all_that_are_alike_and_never_taken_for_another() -> None:
    """However many there are, and with whatever else in them; a gated pod may be held to less and less."""
    cache = RequestCache(BUILT_IN, builders.LABELS)
    long = [{"name": "A", "value": "x" * LONGEST_REMEMBERED}]
    many = [{"tencent.com/vcuda-core": 100 * number} for number in range(1, MOST_REQUESTS_REMEMBERED + 2)]
    env = [{**builders.container(limits), "env": long} for limits in many[:2]]
    held: list[dict[str, Any]] = [{"affinity": builders.held_to("M40")}, {"affinity": builders.held_to("P100")}, {}]
    selected = [{"nodeSelector": {builders.MODEL: model}} for model in ("M40", "A100")]
    manifests = [*map(stored, [*many, *many[:2]]), *(stored(containers=[each]) for each in env)]
    manifests += [stored(many[0], "Pending", **spec) for spec in (*held, *selected)]
    for manifest in manifests:
        pod = builders.view(manifest)
        assert read_stored(pod, builders.LABELS, BUILT_IN, cache) == read_stored(pod, builders.LABELS)


def test_whose_an_allocation_is_does_not_depend_on_how_many_keys_there_are() -> None:
    keys = {f"tencent.com/predicate-gpu-idx-{number}": "0" for number in range(2 * MOST_KEYS_REMEMBERED)}
    few = kept(stored_with(dict([*keys.items()][:2]))).allocation
    many = kept(stored_with(keys)).allocation
    assert few
    assert many
    assert few.schemes == many.schemes == (GPU_MANAGER,)


def stored_with(annotations: dict[str, str]) -> builders.Manifest:
    manifest = stored()
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}
