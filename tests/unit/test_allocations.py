"""What is kept of the allocation on a pod, and whose it is."""

from __future__ import annotations

import pytest

from tests.allocated import NODE, allocated_pod, marks
from tests.builders import LABELS, view
from vcuda.allocations.stored_pods import Allocation, Keys, read_stored
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SCHEMES, VGPU_MANAGER, Scheme, is_named

EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)


def kept(manifest: dict[str, object]) -> Allocation | None:
    stored = read_stored(view(manifest), LABELS)
    assert stored
    return stored.allocation


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
    found = kept(
        allocated_pod(
            scheme,
            1000,
            phase="done",
            annotations={"a/b": "c", f"{scheme.predicate_node}s": "d"},
            labels={"app": "train"},
        )
    )
    assert found == Allocation(annotations, labels, (scheme,))
    assert found.keys_of(scheme) == Keys(tuple(annotations), tuple(labels))
    assert found.get(scheme.predicate_node) == NODE


@EACH
def test_nothing_is_kept_of_a_pod_without_one(scheme: Scheme) -> None:
    manifest = allocated_pod(scheme, 1000)
    manifest["metadata"] |= {"annotations": {"a/b": "c"}, "labels": {"app": "train"}}
    assert kept(manifest) is None
    del manifest["metadata"]["annotations"], manifest["metadata"]["labels"]
    assert kept(manifest) is None


@pytest.mark.parametrize("scheme", [NVIDIA_VCUDA, VGPU_MANAGER], ids=lambda scheme: scheme.name)
def test_what_two_vendors_write_under_one_name_belongs_to_the_one_that_the_pod_asks(scheme: Scheme) -> None:
    found = kept(allocated_pod(scheme, 1000))
    assert found
    assert [each.name for each in found.schemes] == [scheme.name]


def test_a_pod_may_carry_what_another_scheme_has_written_too() -> None:
    """Its manifest was copied, or it asks by both; each of the two is judged by its own."""
    foreign, _ = marks(HAMI, 1000)
    found = kept(allocated_pod(GPU_MANAGER, 1000, annotations=foreign))
    assert found
    assert [scheme.name for scheme in found.schemes] == ["gpu-manager", "hami"]
    assert found.keys_of(HAMI).annotations == tuple(foreign)
    assert not set(found.keys_of(GPU_MANAGER).annotations) & set(foreign)
    assert found.keys_of(VGPU_MANAGER) == Keys((), ())


def test_an_empty_value_tells_nothing() -> None:
    found = kept(allocated_pod(GPU_MANAGER, 1000, node=""))
    assert found
    assert found.get("tencent.com/predicate-node") is None
    assert found.get(None) is None
