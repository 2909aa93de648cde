"""Tests of how custom resources are read. The manifests are in tests/data."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from tests.builders import Manifest, container, view
from tests.unit.test_workloads import fault, read, unread
from vcuda.pod_templates import MAX_TEMPLATES
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import read_request
from vcuda.workloads import Unread
from webhook.check.files import typed_workloads

POD = {"spec": {"containers": [container({"nvidia.com/gpu": 1})]}}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
CASES = yaml.safe_load((Path(__file__).parents[1] / "data" / "custom-workloads.yaml").read_text())


def custom(kind: str, **spec: Any) -> Manifest:
    return {"apiVersion": "example.com/v1", "kind": kind, "metadata": {"name": "train"}, "spec": spec}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_each_pod_template_of_a_custom_object_is_read_with_its_count(case: Manifest) -> None:
    found = read(custom(case["kind"], **case["spec"]))
    assert {each.part: each.count if each.is_counted else None for each in found} == case["pods"]
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
