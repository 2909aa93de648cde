"""Tests of the rules of each vendor by which an allocation of cards is stale, and of expired locks on nodes."""

from collections.abc import Mapping
from typing import Any

import jsonpatch
import msgspec
import pytest
from hypothesis import given, strategies as st

from examples.allocations import NODE, RECORDED, allocated_pod, marks, rfc3339, unix
from tests.builders import LABELS, view
from tests.tables import cases
from vcuda.allocations import stale
from vcuda.allocations.stale import ABSURD, Lock, Removal, find_stale_lock, read_locks, removal_patch
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.k8s_types import Node, ObjectMeta
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, VGPU_MANAGER, Scheme

START = 1_700_000_000.0
TIMEOUT = 300.0
LATE = START + TIMEOUT
"""The first moment at which an allocation that was made at START is stale."""

EACH = pytest.mark.parametrize("scheme", RECORDED, ids=lambda scheme: scheme.name)
WITH_PHASE = pytest.mark.parametrize("scheme", [HAMI, VGPU_MANAGER], ids=lambda scheme: scheme.name)


def stored(scheme: Scheme, **fields: Any) -> StoredPod:
    """Return a stored pod, as the rules read it. Its cards were allocated at START."""
    found = read_stored(view(allocated_pod(scheme, fields.pop("at", START), **fields)), LABELS, whole_keys=True)
    assert found
    return found


def with_annotations(pod: StoredPod, annotations: Mapping[str, str]) -> StoredPod:
    assert pod.allocation
    told = {**pod.allocation.annotations, **annotations}
    return msgspec.structs.replace(pod, allocation=msgspec.structs.replace(pod.allocation, annotations=told))


def find_stale(pod: StoredPod, now: float, *nodes: str) -> tuple[Removal, ...]:
    """Return the stale allocations of the pod in a cluster with these nodes, by default only gpu-1."""
    return tuple(stale.find_stale(pod, (nodes or (NODE,)).__contains__, now, TIMEOUT))


def rules(pod: StoredPod, now: float, *nodes: str) -> list[str]:
    return [removal.rule for removal in find_stale(pod, now, *nodes)]


def due(pod: StoredPod, *nodes: str, now: float = START) -> float | None:
    return stale.first_stale(pod, (nodes or (NODE,)).__contains__, now, TIMEOUT)


# Tests of stale allocations of pods that were never bound to a node


@EACH
def test_an_allocation_is_stale_when_its_pod_was_not_bound_in_time(scheme: Scheme) -> None:
    pod = stored(scheme)
    assert rules(pod, LATE - 1) == []
    assert rules(pod, LATE) == ["unbound"]
    assert due(pod) == LATE


@EACH
def test_exactly_the_keys_that_the_scheme_wrote_are_removed(scheme: Scheme) -> None:
    pod = stored(scheme, annotations={"a/b": "c"}, labels={"app": "train"})
    annotations, labels = marks(scheme, START)
    [removal] = find_stale(pod, LATE)
    why = "the allocation was made at 2023-11-14T22:13:20Z, and the pod was never bound"
    assert removal == Removal(scheme.name, "unbound", why, tuple(annotations), tuple(labels))


@EACH
@pytest.mark.parametrize(
    "text",
    ["", "soon", "-5", "1.7e18", "1_700", "17 ", "٣", "0x10", "9" * 21, "9" * 5000, str(2**64 - 1)],
    ids=lambda text: text[:12] or "empty",
)
def test_an_impossible_time_counts_as_the_pods_creation(scheme: Scheme, text: str) -> None:
    """vgpu-manager writes the largest 64-bit number for "never", so this number is among these times."""
    pod = stored(scheme, at=START + 50, created=START, annotations={})
    assert due(with_annotations(pod, dict.fromkeys(scheme.predicate_times, text))) == LATE


@EACH
@cases(
    "at, counts",
    after_the_creation=(START + 50, START + 50),
    before_it_copied_with_the_manifest=(START - 5000, START),
    in_another_unit=(1.0, START),
    an_hour_ahead_a_clock_that_is_wrong_but_the_newest_there_is=(START + 3600, START + 3600),
    just_believable=(START + ABSURD, START + ABSURD),
    more_than_a_day_ahead=(START + ABSURD + 1, START),
)
def test_the_time_of_each_scheme_is_used(scheme: Scheme, at: float, counts: float) -> None:
    pod = stored(scheme, at=at, created=START)
    assert due(pod) == counts + TIMEOUT
    assert rules(pod, START) == []


def test_the_newest_of_two_times_is_used() -> None:
    """HAMi writes one time when it chooses a node for the pod, and another time when it binds the pod."""
    for newer in HAMI.predicate_times:
        again = with_annotations(stored(HAMI, annotations={}), {newer: unix(HAMI, START + 70)})
        assert due(again) == LATE + 70


@EACH
@pytest.mark.parametrize("created", [None, "", "yesterday", "2023-11-14T22:13:20"])
def test_without_any_time_it_is_never_stale_by_time(scheme: Scheme, created: str | None) -> None:
    pod = msgspec.structs.replace(stored(scheme), created=created or "")
    timeless = with_annotations(pod, dict.fromkeys(scheme.predicate_times, ""))
    assert due(timeless) is None
    assert rules(timeless, START + 10 * ABSURD) == []


def test_a_creation_in_the_far_future_is_no_error() -> None:
    pod = msgspec.structs.replace(stored(HAMI), created="9999-12-31T23:59:59-14:00")
    assert rules(pod, LATE) == []


@WITH_PHASE
def test_a_bind_that_never_finished_has_its_own_reason(scheme: Scheme) -> None:
    pod = stored(scheme, phase="allocating")
    assert rules(pod, LATE - 1) == []
    [removal] = find_stale(pod, LATE)
    why = "the binding of the pod began at 2023-11-14T22:13:20Z and never completed"
    assert (removal.rule, removal.why) == ("allocating", why)
    assert due(pod) == LATE


@EACH
def test_a_success_mark_does_not_keep_the_allocation_of_an_unbound_pod(scheme: Scheme) -> None:
    """A device plugin only serves bound pods. So the mark on an unbound pod was copied from another pod's manifest."""
    assert rules(stored(scheme, phase="done"), LATE) == ["unbound"]


# Tests of deleted nodes


@EACH
def test_an_allocation_on_a_node_that_does_not_exist_is_stale_at_once(scheme: Scheme) -> None:
    pod = stored(scheme)
    [removal] = find_stale(pod, START, "other")
    assert (removal.rule, removal.why) == ("node-gone", "node gpu-1 of the allocation does not exist")
    assert (due(pod, "other") or LATE) <= START


@EACH
def test_an_allocation_that_names_no_node_waits_for_its_time(scheme: Scheme) -> None:
    assert due(stored(scheme, node=None), "other") == LATE


# Tests of bound pods


@EACH
@pytest.mark.parametrize("status", ["Pending", "Running", "Unknown", ""])
@pytest.mark.parametrize("phase", [None, "allocating", "done"])
@pytest.mark.parametrize("nodes", [(NODE,), ("other",)], ids=["its node exists", "its node was deleted"])
def test_an_allocation_is_never_stale_on_the_node_of_its_pod(
    scheme: Scheme, status: str, phase: str | None, nodes: tuple[str, ...]
) -> None:
    """A Node object may be deleted for a moment and registered again, while all its pods keep running."""
    pod = stored(scheme, status=status, phase=phase, bound=NODE)
    assert rules(pod, START + 10 * ABSURD, *nodes) == []
    assert due(pod, *nodes) is None


@EACH
def test_an_allocation_without_a_node_is_never_stale_on_a_bound_pod(scheme: Scheme) -> None:
    """If the scheduler has not written the name of the node, gpu-manager leaves it out too."""
    pod = stored(scheme, node=None, bound=NODE)
    assert due(pod) is None


@EACH
@pytest.mark.parametrize("status", ["Pending", "Running"])
@pytest.mark.parametrize(
    "nodes", [(NODE, "gpu-2"), ("gpu-2",)], ids=["the other node exists", "the other node was deleted"]
)
def test_an_allocation_for_another_node_than_the_pods_is_stale_after_its_time(
    scheme: Scheme, status: str, nodes: tuple[str, ...]
) -> None:
    """Before that time, the pod may still be starting."""
    pod = stored(scheme, status=status, bound="gpu-2")
    assert rules(pod, LATE - 1, *nodes) == []
    [removal] = find_stale(pod, LATE, *nodes)
    assert (removal.rule, removal.why) == ("other-node", "the allocation is for gpu-1, but the pod is bound to gpu-2")
    assert due(pod, *nodes) == LATE


@EACH
def test_an_allocation_that_a_device_plugin_confirmed_belongs_to_the_pods_node(scheme: Scheme) -> None:
    """Schedulers count a confirmed allocation on the pod's node. Without it, its cards could be allocated twice."""
    pod = stored(scheme, phase="done", bound="gpu-2")
    assert due(pod) is None


# Tests of stale allocations of pods that have ended


@EACH
@pytest.mark.parametrize("status", ["Succeeded", "Failed"])
@pytest.mark.parametrize("bound", [None, NODE, "gpu-2"])
@pytest.mark.parametrize("phase", [None, "done"])
def test_an_allocation_on_a_pod_that_has_ended_is_stale_at_once(
    scheme: Scheme, status: str, bound: str | None, phase: str | None
) -> None:
    [removal] = find_stale(stored(scheme, status=status, bound=bound, phase=phase), START)
    assert (removal.rule, removal.why) == ("finished", "the pod has ended")


@EACH
def test_a_pod_that_is_being_deleted_is_judged_like_any_other(scheme: Scheme) -> None:
    """A terminating pod uses its cards while it runs. If it was never bound, a finalizer may keep it without end."""
    gone = {"deletionTimestamp": "2023-11-14T22:13:21Z"}
    assert rules(stored(scheme, bound=NODE, status="Running", **gone), LATE) == []
    assert rules(stored(scheme, **gone), LATE) == ["unbound"]


# Tests of pods to which several vendors have allocated cards


def test_the_allocations_of_two_schemes_are_judged_separately() -> None:
    foreign, _ = marks(HAMI, START + 100, node="gpu-9")
    pod = stored(GPU_MANAGER, annotations=foreign)
    nodes = (NODE, "gpu-9")
    assert due(pod, *nodes) == LATE
    assert [(r.scheme, r.rule) for r in find_stale(pod, LATE, *nodes)] == [("gpu-manager", "unbound")]
    assert [r.scheme for r in find_stale(pod, LATE + 100, *nodes)] == ["gpu-manager", "hami"]
    gone = find_stale(pod, START)
    assert [(r.scheme, r.rule) for r in gone] == [("hami", "node-gone")]
    assert set(gone[0].annotations) == set(foreign)


def test_a_name_that_two_schemes_share_is_removed_once() -> None:
    """Two vendors share a key under nvidia.com/. A JSON Patch that removes the key twice would fail."""
    other, _ = marks(VGPU_MANAGER, START)
    pod = stored(NVIDIA_VCUDA, annotations=other)
    assert pod.allocation
    keys = [key for removal in find_stale(pod, LATE) for key in removal.annotations]
    assert sorted(keys) == sorted(pod.allocation.annotations)


# Property tests

TIMES = st.one_of(st.integers(0, 700).map(lambda s: START + s), st.just(START + 2 * ABSURD))


@st.composite
def pods(draw: st.DrawFn) -> StoredPod:
    scheme, other = draw(st.sampled_from(RECORDED)), draw(st.sampled_from(RECORDED))
    extra, extra_labels = marks(other, draw(TIMES), node=draw(st.sampled_from([NODE, "gpu-2", "", None])))
    both = draw(st.booleans())
    return stored(
        scheme,
        at=draw(TIMES),
        created=START,
        node=draw(st.sampled_from([NODE, "gpu-2", "gpu-9", "", None])),
        phase=draw(st.sampled_from([None, "allocating", "done"])),
        status=draw(st.sampled_from(["Pending", "Running", "Unknown", "Succeeded", "Failed"])),
        bound=draw(st.sampled_from([None, NODE, "gpu-2"])),
        annotations=extra if both else {},
        labels=extra_labels if both else {},
    )


@given(pod=pods(), now=st.integers(0, 2000).map(lambda s: START + s), nodes=st.sets(st.sampled_from([NODE, "gpu-2"])))
def test_a_pod_is_due_exactly_when_something_on_it_is_stale(pod: StoredPod, now: float, nodes: set[str]) -> None:
    """The controller first checks a pod at ``first_stale``. It must miss no stale allocation, and not check in vain."""
    since = stale.first_stale(pod, nodes.__contains__, now, TIMEOUT)
    found = stale.find_stale(pod, nodes.__contains__, now, TIMEOUT)
    assert bool(found) is (since is not None and since <= now)


@given(pod=pods(), now=st.integers(0, 2000).map(lambda s: START + s), nodes=st.sets(st.sampled_from([NODE, "gpu-2"])))
def test_a_pod_on_its_allocated_node_is_never_changed(pod: StoredPod, now: float, nodes: set[str]) -> None:
    assert pod.allocation
    removed = stale.find_stale(pod, nodes.__contains__, now, 0.0)
    by_name = {scheme.name: scheme for scheme in pod.allocation.schemes}
    if pod.live and pod.node:
        for removal in removed:
            named = pod.allocation.get(by_name[removal.scheme].predicate_node)
            assert named not in (None, pod.node)


@given(pod=pods(), now=st.integers(0, 2000).map(lambda s: START + s))
def test_the_patch_removes_exactly_the_findings_and_only_from_that_version(pod: StoredPod, now: float) -> None:
    assert pod.allocation
    removals = find_stale(pod, now)
    metadata: dict[str, Any] = {
        "resourceVersion": "7",
        "annotations": {**pod.allocation.annotations, "own/~1": "x"},
        "labels": {**pod.allocation.labels, "app": "train"},
    }
    patch = msgspec.json.decode(removal_patch("7", removals))
    after = jsonpatch.apply_patch({"metadata": metadata}, patch)["metadata"]
    gone = {key for removal in removals for key in (*removal.annotations, *removal.labels)}
    assert after["annotations"].keys() == metadata["annotations"].keys() - gone
    assert after["labels"].keys() == metadata["labels"].keys() - gone
    assert after["annotations"]["own/~1"] == "x"
    with pytest.raises(jsonpatch.JsonPatchTestFailed):
        jsonpatch.apply_patch({"metadata": {**metadata, "resourceVersion": "8"}}, patch)


LOCK = "hami.io/mutex.lock"
NOW = rfc3339(START)


def locks(value: str | None) -> list[Lock]:
    annotations = {"a/b": "c"} if value is None else {"a/b": "c", LOCK: value}
    return list(read_locks(Node(ObjectMeta(name="gpu-1", annotations=annotations))))


def rule(lock: Lock, now: float, *pods: tuple[str, str], seen: float = START) -> str | None:
    removal = find_stale_lock(lock, lock.expires(seen, now, TIMEOUT), now, lambda *holder: holder in pods)
    return removal.rule if removal else None


@cases(
    "value, taken, holder",
    before_HAMi_2_5_the_time_alone=(NOW, START, None),
    with_its_pod=(f"{NOW},team-a,train-0", START, ("team-a", "train-0")),
    another_zone=("2023-11-15T06:13:20+08:00,team-a,train-0", START, ("team-a", "train-0")),
    half_a_pod=(f"{NOW},team-a", START, None),
    no_pod=(f"{NOW},,", START, None),
    of_a_form_that_is_not_known=(f"{NOW},team-a,train-0,more", START, None),
    no_time=("soon,team-a,train-0", None, ("team-a", "train-0")),
    a_time_without_its_zone=("2023-11-14T22:13:20", None, None),
    empty=("", None, None),
)
def test_a_lock_is_parsed(value: str, taken: float | None, holder: tuple[str, str] | None) -> None:
    [lock] = locks(value)
    assert (lock.scheme.name, lock.value, lock.taken, lock.holder) == ("hami", value, taken, holder)


def test_a_node_without_a_lock_is_not_locked() -> None:
    assert locks(None) == []
    assert list(read_locks(Node())) == []


@cases(
    "value, pod, now, why",
    whoever_holds_it_its_time_is_not_over=(f"{NOW},team-a,train-0", "train-0", LATE - 1, None),
    whoever_holds_it_its_time_is_over=(f"{NOW},team-a,train-0", "train-0", LATE, "lock-expired"),
    its_pod_is_gone=(f"{NOW},team-a,train-0", "another", START, "lock-holder-gone"),
    it_names_no_pod_and_waits=(NOW, "train-0", LATE - 1, None),
    it_names_no_pod_and_its_time_is_over=(NOW, "train-0", LATE, "lock-expired"),
)
def test_a_lock_is_stale_after_its_time(value: str, pod: str, now: float, why: str | None) -> None:
    [lock] = locks(value)
    assert rule(lock, now, ("team-a", pod)) == why


@pytest.mark.parametrize("value", ["soon", rfc3339(START + 2 * ABSURD)], ids=["no time", "more than a day ahead"])
def test_a_lock_with_an_impossible_time_is_stale_when_it_was_seen_for_long_enough(value: str) -> None:
    [lock] = locks(value)
    assert rule(lock, START + 99 + TIMEOUT, seen=START + 100) is None
    assert rule(lock, START + 100 + TIMEOUT, seen=START + 100) == "lock-expired"


@pytest.mark.parametrize("value", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_times_in_the_far_past_and_future_are_no_error(value: str) -> None:
    [lock] = locks(value)
    assert rule(lock, START + TIMEOUT) == "lock-expired"


def test_a_removal_has_its_keys_and_its_reason() -> None:
    [lock] = locks(f"{NOW},team-a,train-0")
    expired = find_stale_lock(lock, LATE, LATE, lambda *_: True)
    gone = find_stale_lock(lock, LATE, START, lambda *_: False)
    assert expired
    assert gone
    assert expired.annotations == gone.annotations == (LOCK,)
    assert expired.why == f"the lock was never released: {NOW},team-a,train-0"
    assert gone.why == "pod team-a/train-0 of the lock does not exist"
