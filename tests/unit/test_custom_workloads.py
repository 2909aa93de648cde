"""Tests of how custom resources are read. The manifests are from the documentation of the resources' projects."""

import json
from typing import Any

from hypothesis import given, strategies as st

from tests.builders import Manifest, container, view
from tests.tables import cases
from tests.unit.test_workloads import fault, read, unread
from vcuda.pod_templates import MAX_TEMPLATES
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import read_request
from vcuda.workloads import Unread
from webhook.check.files import typed_workloads

POD = {"spec": {"containers": [container({"nvidia.com/gpu": 1})]}}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
PYTORCH = "spec.pytorchReplicaSpecs"


def custom(kind: str, **spec: Any) -> Manifest:
    return {"apiVersion": "example.com/v1", "kind": kind, "metadata": {"name": "train"}, "spec": spec}


@cases(
    "manifest, pods",
    PyTorchJob=(
        custom(
            "PyTorchJob",
            pytorchReplicaSpecs={
                "Master": {"replicas": 1, "restartPolicy": "OnFailure", "template": POD},
                "Worker": {"replicas": 7, "restartPolicy": "OnFailure", "template": POD},
            },
        ),
        {f"{PYTORCH}.Master.template": 1, f"{PYTORCH}.Worker.template": 7},
    ),
    RayCluster=(
        custom(
            "RayCluster",
            rayVersion="2.46.0",
            headGroupSpec={"rayStartParams": {}, "template": POD},
            workerGroupSpecs=[{"groupName": "gpu", "replicas": 2, "numOfHosts": 4, "maxReplicas": 9, "template": POD}],
        ),
        {"spec.headGroupSpec.template": 1, "spec.workerGroupSpecs[0].template": 8},
    ),
    JobSet=(
        custom(
            "JobSet",
            replicatedJobs=[
                {"name": "driver", "template": {"spec": {"template": POD}}},
                {"name": "workers", "replicas": 2, "template": {"spec": {"parallelism": 4, "template": POD}}},
            ],
        ),
        {
            "spec.replicatedJobs[0].template.spec.template": 1,
            "spec.replicatedJobs[1].template.spec.template": 8,
        },
    ),
    LeaderWorkerSet=(
        custom("LeaderWorkerSet", replicas=2, leaderWorkerTemplate={"size": 4, "workerTemplate": POD}),
        {"spec.leaderWorkerTemplate.leaderTemplate": 2, "spec.leaderWorkerTemplate.workerTemplate": 6},
    ),
    LeaderWorkerSet_of_leaders=(
        custom("LeaderWorkerSet", leaderWorkerTemplate={"leaderTemplate": POD, "workerTemplate": POD}),
        {"": 1},
    ),
    InferenceService_of_a_model=(
        custom("InferenceService", predictor={"minReplicas": 3, "model": {"modelFormat": {"name": "pytorch"}, **GPU}}),
        {"": 3},
    ),
    InferenceService_of_containers=(
        custom(
            "InferenceService",
            predictor={"minReplicas": 0, "containers": [{"name": "kserve-container", **GPU}]},
            transformer={"containers": [{"name": "transform", **GPU}]},
        ),
        {"spec.predictor": 1, "spec.transformer": 1},
    ),
    LLMInferenceService=(custom("LLMInferenceService", template=POD["spec"]), {"": 1}),
    LLMInferenceService_of_several_nodes=(
        custom(
            "LLMInferenceService",
            replicas=2,
            parallelism={"tensor": 8, "data": 16, "dataLocal": 4},
            template=POD["spec"],
            worker=POD["spec"],
            prefill={"scaling": {"minReplicas": 3}, "parallelism": {"pipeline": 2}, "worker": POD["spec"]},
        ),
        {"spec.template": 2, "spec.worker": 6, "spec.prefill.worker": 3},
    ),
    Workflow=(
        custom(
            "Workflow",
            entrypoint="main",
            nodeSelector={"disk": "ssd"},
            templates=[
                {"name": "main", "steps": [[{"name": "a", "template": "train"}]]},
                {"name": "train", "container": {"image": "train", **GPU}},
                {"name": "score", "script": {"image": "python", "source": "print()", **GPU}},
            ],
        ),
        {"spec.templates[1]": None, "spec.templates[2]": None},
    ),
    CronWorkflow=(
        custom("CronWorkflow", workflowSpec={"templates": [{"name": "train", "container": {"image": "train", **GPU}}]}),
        {"": None},
    ),
    Rollout=(custom("Rollout", replicas=5, strategy={"canary": {}}, template=POD), {"": 5}),
    Notebook=(custom("Notebook", template=POD), {"": 1}),
    an_unknown_kind=(custom("Trainer", template=POD), {"": None}),
    an_unknown_kind_with_a_count=(custom("Trainer", pool={"replicas": 3, "podTemplate": POD}), {"": 3}),
)
def test_each_pod_template_of_a_custom_object_is_read_with_its_count(
    manifest: Manifest, pods: dict[str, int | None]
) -> None:
    found = read(manifest)
    assert {each.part: each.count if each.is_counted else None for each in found} == pods
    assert {read_request(view(each.created)).charge for each in found} == {Charge(100, 0, 100)}


NAMES = st.sampled_from(
    ["template", "spec", "containers", "replicas", "templates", "container", "predictor", "workerSpec", "metadata"]
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(NAMES, each, max_size=4),
)


@given(st.sampled_from(["X", "InferenceService", "LLMInferenceService", "LeaderWorkerSet", "Workflow"]), TREES)
def test_any_object_is_read_skipped_or_malformed_and_never_ends_the_check(kind: str, spec: object) -> None:
    found = typed_workloads("file", json.dumps({"kind": kind, "spec": spec}), "team-a")
    assert found
    assert all(isinstance(each, Unread) or each.count >= 0 for each in found)


def test_a_skipped_object_is_shown_with_its_own_namespace() -> None:
    found = unread("{kind: X, metadata: {name: a, namespace: team-b}}")
    assert (found.title, found.namespace) == ("X/a", "team-b")


def test_the_templates_of_a_workflow_inherit_its_node_selector() -> None:
    templates = [{"name": "train", "container": {"image": "train", **GPU}}]
    (found,) = read(custom("Workflow", nodeSelector={"disk": "ssd"}, templates=templates))
    assert found.created["spec"]["nodeSelector"] == {"disk": "ssd"}


def test_a_custom_object_has_a_bounded_number_of_templates() -> None:
    groups = [{"template": json.loads(json.dumps(POD))} for _ in range(MAX_TEMPLATES + 1)]
    assert fault(json.dumps(custom("RayCluster", groups=groups))) == (
        f"file, document 1: an object must not have more than {MAX_TEMPLATES} pod templates"
    )
