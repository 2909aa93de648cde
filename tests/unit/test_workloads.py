"""What manifests are read, as how many pods, and what is said of those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import LABELS, MODEL, Manifest, container, vcuda_pod, view
from vcuda.errors import BadInput, QuotaFault
from vcuda.quota.model import Charge, Limit
from vcuda.requests.pod_request import read_request
from vcuda.workloads import MOST_PODS, Workload, workloads_in
from webhook.check import read_workloads
from webhook.context import read_nodes, read_quota

TEMPLATE = {"metadata": {"labels": {"app": "train"}}, "spec": {"containers": [container({"nvidia.com/gpu": 2})]}}


def workload(kind: str, name: str = "train", **spec: Any) -> Manifest:
    made = {**spec, "template": TEMPLATE}
    body = {"jobTemplate": {"spec": made}} if kind == "CronJob" else made
    return {"apiVersion": "x/v1", "kind": kind, "metadata": {"name": name}, "spec": body}


def read(*manifests: object) -> list[Workload]:
    return workloads_in("file", yaml.safe_dump_all(manifests), "team-a")


def fault(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        workloads_in("file", text, "team-a")
    return str(caught.value)


# Workloads


@pytest.mark.parametrize(
    ("kind", "spec", "count"),
    [
        pytest.param("Deployment", {}, 1, id="Deployment"),
        pytest.param("Deployment", {"replicas": 3}, 3, id="Deployment of 3"),
        pytest.param("Deployment", {"replicas": 0}, 0, id="Deployment of none"),
        pytest.param("Deployment", {"replicas": None}, 1, id="Deployment of null"),
        pytest.param("StatefulSet", {"replicas": 3}, 3, id="StatefulSet"),
        pytest.param("ReplicaSet", {"replicas": 3}, 3, id="ReplicaSet"),
        pytest.param("ReplicationController", {"replicas": 3}, 3, id="ReplicationController"),
        pytest.param("DaemonSet", {}, 1, id="DaemonSet"),
        pytest.param("DaemonSet", {"replicas": 3}, 1, id="DaemonSet has no replicas"),
        pytest.param("Job", {}, 1, id="Job"),
        pytest.param("Job", {"parallelism": 4}, 4, id="Job in parallel"),
        pytest.param("Job", {"parallelism": 4, "completions": 2}, 2, id="Job with fewer completions"),
        pytest.param("Job", {"parallelism": 4, "completions": 9}, 4, id="Job with more completions"),
        pytest.param("Job", {"completions": 9}, 1, id="Job, one after another"),
        pytest.param("CronJob", {}, 1, id="CronJob"),
        pytest.param("CronJob", {"parallelism": 4}, 4, id="CronJob in parallel"),
        pytest.param("Deployment", {"replicas": MOST_PODS}, MOST_PODS, id="as many as can be checked"),
    ],
)
def test_pods_at_once(kind: str, spec: dict[str, Any], count: int) -> None:
    (found,) = read(workload(kind, **spec))
    assert (found.kind, found.name, found.namespace, found.count) == (kind, "train", "team-a", count)
    assert read_request(view(found.pod)).charge == Charge(200, 0, 200)


def test_a_pod_as_its_owner_would_create_it() -> None:
    (found,) = read(workload("Deployment"))
    assert found.pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {"app": "train"}, "generateName": "train-", "namespace": "team-a"},
        "spec": TEMPLATE["spec"],
    }


def test_a_pod_stays_as_it_is() -> None:
    manifest = vcuda_pod(annotations={"a": "b"})
    (found,) = read(manifest)
    assert found == Workload("Pod", "train-0", "team-a", {**manifest, "metadata": found.pod["metadata"]}, 1)
    assert found.pod["metadata"] == {**manifest["metadata"], "namespace": "team-a"}


def test_an_objects_own_namespace_comes_first() -> None:
    (found,) = read(vcuda_pod(metadata={"namespace": "team-b"}))
    assert (found.namespace, found.pod["metadata"]["namespace"]) == ("team-b", "team-b")
    (found,) = read({**workload("Job"), "metadata": {"name": "train", "namespace": "team-b"}})
    assert (found.namespace, found.pod["metadata"]["namespace"]) == ("team-b", "team-b")


def test_generate_name_stands_for_a_name() -> None:
    (found,) = read({**vcuda_pod(), "metadata": {"generateName": "train-"}})
    assert found.name == "train-"


def test_documents_lists_and_json_are_read_in_order() -> None:
    listed = {"kind": "List", "items": [workload("Job", "b"), {"kind": "PodList", "items": [vcuda_pod()]}]}
    names = [found.name for found in read(workload("Job", "a"), None, listed, workload("Job", "c"))]
    assert names == ["a", "b", "train-0", "c"]
    assert [found.name for found in workloads_in("file", json.dumps(listed), "team-a")] == ["b", "train-0"]


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing", "kind: List\nitems: []", "kind: List\nitems: null"])
def test_nothing_to_read(text: str) -> None:
    assert workloads_in("file", text, "team-a") == []


def test_what_yaml_makes_of_unquoted_text_is_still_text() -> None:
    """A date is text to kubectl, and a number as a label's key is too."""
    text = "{kind: Pod, metadata: {name: x, annotations: {on: 2024-01-31, 7: seven}}, spec: {containers: []}}"
    (found,) = workloads_in("file", text.replace("on:", "'on':"), "team-a")
    assert found.pod["metadata"]["annotations"] == {"on": "2024-01-31", "7": "seven"}


# What cannot be read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a", "no Kubernetes object: it has no kind", id="text"),
        pytest.param("[]", "no Kubernetes object: it has no kind", id="a list"),
        pytest.param("{}", "no Kubernetes object: it has no kind", id="an empty mapping"),
        pytest.param("kind: 5", "no Kubernetes object: it has no kind", id="kind is a number"),
        pytest.param("kind: List\nitems: [x]", "no Kubernetes object: it has no kind", id="listed text"),
        pytest.param("kind: List\nitems: 5", "items must be a list", id="items is a number"),
        pytest.param("kind: List\nitems: {a: b}", "items must be a list", id="items is a mapping"),
        pytest.param("kind: Pod\nmetadata: []", "metadata must be a mapping", id="metadata is a list"),
        pytest.param(
            "kind: Pod\nmetadata: {namespace: a/../b}",
            "'a/../b' can never be a namespace; write at most 63 lower-case letters, digits and `-`,"
            " with a letter or digit at both ends",
            id="a namespace that is none",
        ),
        pytest.param("kind: Pod\nspec: null", "malformed: it has no pod spec", id="no spec"),
        pytest.param("kind: Job\nspec: {}", "malformed: it has no pod spec", id="no template"),
        pytest.param("kind: Job\nspec: x", "spec must be a mapping", id="spec is text"),
        pytest.param("kind: Job\nspec: {template: x}", "template must be a mapping", id="template"),
        pytest.param("kind: CronJob\nspec: {jobTemplate: []}", "jobTemplate must be a mapping", id="jobTemplate"),
    ],
)
def test_no_workload(text: str, message: str) -> None:
    assert fault(text) == f"file, document 1: {message}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("kind: Rollout\nspec: {template: {spec: {containers: []}}}", id="a template"),
        pytest.param(
            "kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: {template: {spec: {containers: []}}}}}",
            id="further in",
        ),
        pytest.param(
            "kind: RayCluster\nspec: {template: x, workers: [{template: {spec: {containers: []}}}]}", id="in a list"
        ),
    ],
)
def test_an_unknown_kind_that_makes_pods(text: str) -> None:
    kind = text.split()[1]
    assert fault(text) == f"file, document 1: how many pods a {kind} makes is not known here; give its pods instead"


@pytest.mark.parametrize(
    ("kind", "count", "shown"),
    [
        ("Job", "parallelism: -1", "-1"),
        ("Deployment", "replicas: 10001", "10001"),
        ("Deployment", "replicas: true", "True"),
        ("Deployment", "replicas: '3'", "'3'"),
    ],
)
def test_no_number_of_pods(kind: str, count: str, shown: str) -> None:
    message = f"file, document 1: {shown} is no number of pods from 0 to 10000"
    assert fault(f"---\nkind: {kind}\nspec: {{{count}, template: {{spec: {{}}}}}}") == message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        pytest.param("kind: Pod\nspec: {containers: x}", "$.spec.containers", id="containers"),
        pytest.param(
            "kind: Pod\nmetadata: {name: 5}\nspec: {containers: []}", "$.metadata.name", id="a number for a name"
        ),
        pytest.param(
            "kind: Pod\nspec: {containers: [{resources: {limits: {nvidia.com/gpu: [1]}}}]}",
            "$.spec.containers[0].resources.limits[...]",
            id="an amount",
        ),
    ],
)
def test_no_pod(text: str, where: str) -> None:
    assert fault(text).startswith("file, document 1: malformed: ")
    assert fault(text).endswith(f"`{where}`")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="unfinished"),
        pytest.param("a: b: c", id="two colons"),
        pytest.param("kind: !!python/name:os.system x", id="a Python object"),
        pytest.param("kind: Pod\non: 2024-13-45", id="a date that is none"),
        pytest.param("kind: Pod\nn: " + "9" * 5000, id="a number without end"),
        pytest.param("[" * 5000, id="nested without end"),
        pytest.param("kind: Pod\n\0", id="a control character"),
    ],
)
def test_not_yaml(text: str) -> None:
    assert fault(text).startswith("file: not YAML: ")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("&a {kind: Pod, spec: *a}", id="an object inside itself"),
        pytest.param('{kind: Pod, metadata: {name: "\\ud800"}}', id="half a surrogate pair"),
    ],
)
def test_yaml_that_json_cannot_hold(text: str) -> None:
    assert fault(text).startswith("file, document 1: malformed: ")


def test_what_makes_no_pods_is_passed_over(tmp_path: Path) -> None:
    """A whole bundle, as kustomize prints it, can be checked."""
    bundle = tmp_path / "bundle.yaml"
    bundle.write_text(
        yaml.safe_dump_all([{"kind": "Service", "spec": {"ports": []}}, {"kind": "ConfigMap"}, vcuda_pod()])
    )
    assert [workload.kind for workload in read_workloads([bundle], "team-a")] == ["Pod"]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("kind: SealedSecret\nspec: {template: {type: Opaque}}", id="another template"),
        pytest.param("kind: X\nspec: {jobTemplate: {spec: {}}, template: {spec: {replicas: 1}}}", id="no containers"),
        pytest.param("kind: X\nspec: {template: {spec: [containers]}}", id="a list"),
        pytest.param("kind: X\nspec: [{template: null}]", id="a template that is null"),
        pytest.param("kind: X\nspec: &a {template: {spec: *a}, same: [*a]}", id="an object inside itself"),
        pytest.param("kind: PodTemplate\ntemplate: {spec: {containers: []}}", id="a template that nothing is made of"),
    ],
)
def test_only_a_template_with_containers_makes_pods_of_an_unknown_kind(text: str) -> None:
    assert workloads_in("file", text, "team-a") == []


def test_aliases_of_aliases_are_looked_at_once() -> None:
    lines = ["a0: &a0 {}", *(f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}]" for at in range(1, 60))]
    text = "kind: X\nspec:\n" + "\n".join(f"  {line}" for line in lines)
    assert workloads_in("file", text, "team-a") == []


def test_a_null_field_counts_as_absent(tmp_path: Path) -> None:
    """As in Kubernetes; YAML written by hand or by a template has them."""
    manifest = vcuda_pod()
    manifest["spec"]["nodeName"] = None
    path = tmp_path / "pod.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert "nodeName" not in read_workloads([path], "team-a")[0].pod["spec"]


def test_the_place_of_a_fault_names_file_and_document(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    rollout = {"kind": "Rollout", "spec": {"template": TEMPLATE}}
    good.write_text(yaml.safe_dump(vcuda_pod()))
    bad.write_text(yaml.safe_dump_all([vcuda_pod(), {"kind": "List", "items": [rollout]}]))
    assert len(read_workloads([good, good], "team-a")) == 2
    with pytest.raises(BadInput) as caught:
        read_workloads([good, bad], "team-a")
    assert (
        str(caught.value)
        == f"{bad}, document 2: how many pods a Rollout makes is not known here; give its pods instead"
    )


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    if content:
        path.write_bytes(content)
    for reading in (lambda: read_workloads([path], "team-a"), lambda: read_quota(path)):
        with pytest.raises(BadInput, match="cannot be read"):
            reading()


# The quota


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("team-a: {quota: {M40: 8}}", id="the document"),
        pytest.param('{"team-a": {"quota": {"M40": 8}}}', id="in JSON"),
        pytest.param("kind: ConfigMap\ndata:\n  gpu_quota: |\n    team-a: {quota: {M40: 8}}", id="the ConfigMap"),
        pytest.param(
            '{"kind": "ConfigMap", "data": {"gpu_quota": "{\\"team-a\\": {\\"quota\\": {\\"M40\\": 8}}}"}}', id="both"
        ),
    ],
)
def test_a_quota_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "quota.yaml"
    path.write_text(text)
    assert read_quota(path).namespaces["team-a"].limits == {"M40": Limit(800)}


@pytest.mark.parametrize("text", ["kind: ConfigMap", "kind: ConfigMap\ndata: {other: x}"])
def test_a_config_map_without_a_quota(text: str, tmp_path: Path) -> None:
    path = tmp_path / "quota.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_quota(path)
    assert str(caught.value) == f"{path}: the ConfigMap has no key gpu_quota"


@pytest.mark.parametrize("text", ["{", "team-a: {quota: {M40: -8}}", "team-a: {quota: {M40: 2024-13-45}}", "[" * 5000])
def test_a_malformed_quota_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "quota.yaml"
    path.write_text(text)
    with pytest.raises(QuotaFault):
        read_quota(path)


# Nodes


def test_a_nodes_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    labelled = {"kind": "Node", "metadata": {"name": "a", "labels": {MODEL: "M40"}}}
    path.write_text(yaml.safe_dump({"kind": "List", "items": [labelled, {"kind": "Node", "metadata": {"name": "b"}}]}))
    found = read_nodes(path, LABELS)
    assert (found.labels, found.by_model) == ({"a": {MODEL: "M40"}, "b": {}}, {"M40": ("a",)})


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"kind": "Pod"}, "document 1: expected a Node, not Pod"),
        ({"kind": "Node", "metadata": {"labels": []}}, "document 1: malformed: "),
    ],
)
def test_a_malformed_nodes_file(manifest: Manifest, message: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with pytest.raises(BadInput) as caught:
        read_nodes(path, LABELS)
    assert str(caught.value).startswith(f"{path}, {message}")
