"""Tests of the changes of a node that the watch reports. Heartbeats, which are most events, are not reported."""

from typing import Any

from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL, POOL
from tests.tables import cases
from vcuda.kube import NodeInformer, QuotaInformer, QuotaSource, RuntimeClassInformer

PATH = "/api/v1/nodes/gpu-1"
LOCK = {"hami.io/mutex.lock": "2023-11-14T22:13:20Z"}
OTHER = {"a/b": "c"}
M40, P100 = {MODEL: "M40"}, {MODEL: "P100"}


def node(labels: dict[str, str], annotations: dict[str, str] = OTHER, **fields: Any) -> dict[str, Any]:
    return {"metadata": {"name": "gpu-1", "labels": labels, "annotations": annotations}, **fields}


@cases(
    "before, after, told, model_changes",
    a_heartbeat=(node(M40), node(M40, status={"conditions": [{"type": "Ready", "status": "True"}]}), False, False),
    a_cordon=(node(M40), node(M40, spec={"unschedulable": True}), True, False),
    a_node_that_is_not_ready=(node(M40), node(M40, status={"conditions": [{"type": "Ready"}]}), True, False),
    an_unrelated_annotation=(node(M40), node(M40, {"a/b": "d"}), False, False),
    a_lock=(node(M40), node(M40, LOCK), True, False),
    another_label=(node(M40), node({**M40, "a/b": "c"}), True, False),
    the_pool_changes=(node(M40), node({**M40, POOL: "public"}), True, True),
    the_node_gets_a_model=(node({}), node(M40), True, True),
    the_node_loses_its_model=(node(M40), node({}), True, True),
    the_model_changes=(node(M40), node(P100), True, True),
    the_node_is_created=(None, node(M40), True, True),
    the_node_is_deleted=(node(M40), None, True, True),
    a_node_without_a_GPU_is_created=(None, node({}), True, False),
    a_node_without_a_GPU_is_deleted=(node({}), None, True, False),
)
def test_only_relevant_changes_of_a_node_are_reported(
    api: ApiDouble, before: dict[str, Any] | None, after: dict[str, Any] | None, told: bool, model_changes: bool
) -> None:
    """A change of a node's GPU model or pool also calls the callback for models. The index then has the new model."""
    changes: list[tuple[bool, bool]] = []
    models: list[str | None] = []
    watch = NodeInformer(api.kube, LABELS, lambda: models.append(watch.current().model_of("gpu-1")))
    watch.follow(lambda old, new: changes.append((old is not None, new is not None)))
    for manifest in (before, after):
        changes.clear()
        models.clear()
        if manifest:
            api.store(PATH, manifest)
        elif PATH in api.objects:
            api.remove(PATH)
        watch.reflector.relist()
    assert changes == ([(before is not None, after is not None)] if told else [])
    assert models == ([(after or node({}))["metadata"]["labels"].get(MODEL)] if model_changes else [])


def test_new_amounts_and_taints_of_a_node_change_only_the_states_of_the_nodes(api: ApiDouble) -> None:
    """Charges and other indexes are computed from the nodes. This must not happen whenever an amount changes."""
    watch = NodeInformer(api.kube, LABELS)
    taints = [{"key": f"k{number}", "effect": "NoSchedule"} for number in range(50)]
    seen = []
    for count, own in (("8", []), ("8", taints), ("0", []), ("7", [])):
        api.store(PATH, node(M40, spec={"taints": own}, status={"allocatable": {"nvidia.com/gpu": count}}))
        watch.reflector.relist()
        seen.append(watch.with_states())
        assert watch.with_states()[1] is seen[-1][1]
    assert all(nodes is seen[0][0] for nodes, _ in seen)
    can_run = [states.take(None) & states.offer({"nvidia.com/gpu": 7}) & 1 for _, states in seen]
    assert can_run == [1, 0, 0, 1]


def test_a_nodes_lock_is_kept_and_no_other_annotation(api: ApiDouble) -> None:
    watch = NodeInformer(api.kube, LABELS)
    api.store(PATH, node(M40, {**OTHER, **LOCK}))
    watch.reflector.relist()
    kept = watch.reflector.get(("", "gpu-1"))
    assert kept
    assert kept.annotations == LOCK


def test_only_the_handler_of_a_runtime_class_is_kept(api: ApiDouble) -> None:
    watch = RuntimeClassInformer(api.kube)
    assert watch.handler_of("fast") is None
    stored = {
        "metadata": {"name": "fast", "annotations": {"a": "b"}},
        "handler": "nvidia",
        "overhead": {"podFixed": {}},
    }
    api.store("/apis/node.k8s.io/v1/runtimeclasses/fast", stored)
    watch.reflector.relist()
    assert watch.reflector.snapshot() == {("", "fast"): "nvidia"}
    assert (watch.handler_of("fast"), watch.handler_of("slow")) == ("nvidia", None)


def test_all_reviews_get_the_same_objects_until_a_quota_exists(api: ApiDouble) -> None:
    """Charges are prepared once for each object of GPU resources. A new object per review would make this useless."""
    quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
    assert quota.in_force() is None
    quota.reflector.relist()
    assert quota.in_force() is not None
    assert quota.in_force() is quota.in_force()
    assert quota.resources() is quota.resources()
