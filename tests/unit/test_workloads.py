"""Tests of the reading of workload manifests."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import Manifest, container, vcuda_pod, view
from tests.tables import cases
from vcuda.documents import MAX_REPEATED, load_all
from vcuda.errors import BadInput
from vcuda.pod_templates import MAX_TEMPLATE_PODS
from vcuda.quota.model import Charge
from vcuda.requests.pod_request import read_request
from vcuda.workloads import NO_TEMPLATE, Unread, Workload
from webhook.check.check import read_workloads
from webhook.check.files import typed_workloads

TEMPLATE = {"metadata": {"labels": {"app": "train"}}, "spec": {"containers": [container({"nvidia.com/gpu": 2})]}}


def workload(kind: str, name: str = "train", **spec: Any) -> Manifest:
    made = {**spec, "template": TEMPLATE}
    body = {"jobTemplate": {"spec": made}} if kind == "CronJob" else made
    return {"apiVersion": "x/v1", "kind": kind, "metadata": {"name": name}, "spec": body}


def read(*manifests: object) -> list[Workload]:
    found = typed_workloads("file", yaml.safe_dump_all(manifests), "team-a")
    assert [each for each in found if isinstance(each, Unread)] == []
    return [each for each in found if isinstance(each, Workload)]


def unread(text: str) -> Unread:
    (found,) = typed_workloads("file", text, "team-a")
    assert isinstance(found, Unread)
    return found


def fault(text: str) -> str:
    found = unread(text)
    assert found.malformed
    return found.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


# Tests of workloads


@cases(
    "kind, spec, count",
    Deployment=("Deployment", {}, 1),
    Deployment_of_3=("Deployment", {"replicas": 3}, 3),
    Deployment_of_none=("Deployment", {"replicas": 0}, 0),
    Deployment_of_null=("Deployment", {"replicas": None}, 1),
    StatefulSet=("StatefulSet", {"replicas": 3}, 3),
    ReplicaSet=("ReplicaSet", {"replicas": 3}, 3),
    ReplicationController=("ReplicationController", {"replicas": 3}, 3),
    DaemonSet=("DaemonSet", {}, 1),
    DaemonSet_has_no_replicas=("DaemonSet", {"replicas": 3}, 1),
    Job=("Job", {}, 1),
    Job_in_parallel=("Job", {"parallelism": 4}, 4),
    Job_with_fewer_completions=("Job", {"parallelism": 4, "completions": 2}, 2),
    Job_with_more_completions=("Job", {"parallelism": 4, "completions": 9}, 4),
    Job_one_after_another=("Job", {"completions": 9}, 1),
    CronJob=("CronJob", {}, 1),
    CronJob_in_parallel=("CronJob", {"parallelism": 4}, 4),
    as_many_as_can_be_checked=("Deployment", {"replicas": MAX_TEMPLATE_PODS}, MAX_TEMPLATE_PODS),
)
def test_a_workload_counts_the_pods_that_it_runs_at_once(kind: str, spec: dict[str, Any], count: int) -> None:
    (found,) = read(workload(kind, **spec))
    assert (found.kind, found.name, found.namespace, found.count) == (kind, "train", "team-a", count)
    assert read_request(view(found.created)).charge == Charge(200, 0, 200)


def test_a_pod_as_its_owner_would_create_it() -> None:
    (found,) = read(workload("Deployment"))
    assert found.created == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {"app": "train"}, "generateName": "train-", "namespace": "team-a"},
        "spec": TEMPLATE["spec"],
    }


def test_a_pod_stays_as_it_is() -> None:
    manifest = vcuda_pod(annotations={"a": "b"})
    (found,) = read(manifest)
    assert found == Workload("Pod", "train-0", "team-a", {**manifest, "metadata": found.created["metadata"]}, 1)
    assert found.created["metadata"] == {**manifest["metadata"], "namespace": "team-a"}


def test_an_objects_own_namespace_overrides_the_flag() -> None:
    job = {**workload("Job"), "metadata": {"name": "train", "namespace": "team-b"}}
    for found in read(vcuda_pod(metadata={"namespace": "team-b"}), job):
        assert (found.namespace, found.created["metadata"]["namespace"]) == ("team-b", "team-b")


def test_generate_name_is_used_as_a_name() -> None:
    (found,) = read({**vcuda_pod(), "metadata": {"generateName": "train-"}})
    assert found.name == "train-"


def test_documents_lists_and_json_are_read_in_order() -> None:
    listed = {"kind": "List", "items": [workload("Job", "b"), {"kind": "PodList", "items": [vcuda_pod()]}]}
    names = [found.name for found in read(workload("Job", "a"), None, listed, workload("Job", "c"))]
    assert names == ["a", "b", "train-0", "c"]
    assert [found.name for found in read(json.loads(json.dumps(listed)))] == ["b", "train-0"]


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing", "kind: List\nitems: []", "kind: List\nitems: null"])
def test_a_file_without_objects_has_no_workloads(text: str) -> None:
    assert typed_workloads("file", text, "team-a") == []


def test_unquoted_text_that_yaml_converts_stays_text() -> None:
    """YAML reads such text as a date or a number, but kubectl keeps it as text."""
    text = "{kind: Pod, metadata: {name: x, annotations: {on: 2024-01-31, 7: seven}}, spec: {containers: []}}"
    (found,) = typed_workloads("file", text.replace("on:", "'on':"), "team-a")
    assert isinstance(found, Workload)
    assert found.created["metadata"]["annotations"] == {"on": "2024-01-31", "7": "seven"}


# Tests of malformed manifests

NO_OBJECT = "the document is not a Kubernetes object: kind is required"
NO_NAMESPACE = (
    "is not a valid namespace: the name of a namespace must have at most 63 lower-case letters, digits and `-`, and "
    "must begin and end with a letter or digit"
)


@cases(
    "text, message",
    text=("a", NO_OBJECT),
    a_list=("[]", NO_OBJECT),
    an_empty_mapping=("{}", NO_OBJECT),
    kind_is_a_number=("kind: 5", NO_OBJECT),
    listed_text=("kind: List\nitems: [x]", NO_OBJECT),
    items_is_a_number=("kind: List\nitems: 5", "items must be a list"),
    items_is_a_mapping=("kind: List\nitems: {a: b}", "items must be a list"),
    metadata_is_a_list=("kind: Pod\nmetadata: []", "metadata must be a mapping"),
    a_namespace_that_is_none=("kind: Pod\nmetadata: {namespace: a/../b}", f"'a/../b' {NO_NAMESPACE}"),
    no_spec=("kind: Pod\nspec: null", "the object has no pod spec"),
    no_template=("kind: Job\nspec: {}", "the object has no pod spec"),
    spec_is_text=("kind: Job\nspec: x", "spec must be a mapping"),
    template=("kind: Job\nspec: {template: x}", "template must be a mapping"),
    jobTemplate=("kind: CronJob\nspec: {jobTemplate: []}", "jobTemplate must be a mapping"),
)
def test_an_object_that_is_no_workload_is_named_by_its_document(text: str, message: str) -> None:
    assert fault(text) == f"file, document 1: {message}"


@cases(
    "spec, shown",
    negative=("kind: Job, spec: {parallelism: -1, template: {spec: {}}}", "-1"),
    too_many=("kind: Deployment, spec: {replicas: 10001, template: {spec: {}}}", "10001"),
    truth=("kind: Deployment, spec: {replicas: true, template: {spec: {}}}", "True"),
    text=("kind: Deployment, spec: {replicas: '3', template: {spec: {}}}", "'3'"),
    text_of_a_custom_object=("kind: X, spec: {replicas: '3', template: {spec: {containers: []}}}", "'3'"),
    negative_hosts=("kind: X, spec: {numOfHosts: -1, replicas: 1, template: {spec: {containers: []}}}", "-1"),
    too_many_of_a_custom_object=("kind: X, spec: {replicas: 10001, template: {spec: {containers: []}}}", "10001"),
    too_many_in_all=("kind: X, spec: {replicas: 200, numOfHosts: 200, template: {spec: {containers: []}}}", "40000"),
)
def test_an_invalid_number_of_pods_is_rejected(spec: str, shown: str) -> None:
    message = f"file, document 1: the number of pods must be between 0 and 10000; got {shown}"
    assert fault(f"{{{spec}}}") == message


@cases(
    "text, where",
    containers=("kind: Pod\nspec: {containers: x}", "$.spec.containers"),
    a_number_for_a_name=("kind: Pod\nmetadata: {name: 5}\nspec: {containers: []}", "$.metadata.name"),
    an_amount=(
        "kind: Pod\nspec: {containers: [{resources: {limits: {nvidia.com/gpu: [1]}}}]}",
        "$.spec.containers[0].resources.limits[...]",
    ),
)
def test_an_invalid_pod_is_rejected_with_its_field(text: str, where: str) -> None:
    assert fault(text).startswith("file, document 1: the object is malformed: ")
    assert fault(text).endswith(f"`{where}`")


@cases(
    "text",
    unfinished="{",
    two_colons="a: b: c",
    a_Python_object="kind: !!python/name:os.system x",
    a_date_that_is_none="kind: Pod\non: 2024-13-45",
    a_number_without_end="kind: Pod\nn: " + "9" * 5000,
    nested_without_end="[" * 5000,
    a_control_character="kind: Pod\n\0",
    half_a_surrogate_pair='{kind: Pod, metadata: {name: "\\ud800"}, spec: {containers: []}}',
    an_empty_number="kind: !!int ''",
)
def test_invalid_yaml_is_rejected(text: str) -> None:
    with pytest.raises(BadInput, match=r"^file: the text cannot be read as YAML: "):
        typed_workloads("file", text, "team-a")


def test_a_number_without_a_json_equivalent_is_rejected() -> None:
    text = f"kind: Pod\nspec: {{containers: [], n: 0x{'f' * 5000}}}"
    assert fault(text).startswith("file, document 1: the object is malformed: ")


NINE = ", ".join(["*{}"] * 9)


def nested(line: str, levels: int = 20) -> str:
    """Return a YAML document in which each level has nine aliases of the level before."""
    lines = ["a0: &a0 {k: v}", *(f"a{at}: &a{at} {line.replace('{}', f'a{at - 1}')}" for at in range(1, levels))]
    return "kind: X\nspec:\n" + "\n".join(f"  {each}" for each in lines)


@cases(
    "text",
    aliases_of_aliases=nested(f"[{NINE}]"),
    merges_of_merges=nested(f"{{<<: [{NINE}]}}"),
    aliases_of_a_long_text=f"kind: X\ntext: &a {'x' * 100_000}\nspec: [{'*a, ' * 50}]",
    aliases_of_many_values=f"kind: X\nvalues: &a [{'x, ' * 1000}]\nspec: [{'*a, ' * 300}]",
    an_object_inside_itself="&a {kind: Pod, spec: *a}",
    a_custom_object_inside_itself="kind: X\nspec: &a {template: {spec: *a}, same: [*a]}",
)
def test_aliases_that_repeat_too_much_are_rejected(text: str) -> None:
    told = f"the aliases of a document must not repeat more than {MAX_REPEATED} characters"
    with pytest.raises(BadInput, match=told):
        typed_workloads("file", text, "team-a")


def test_json_with_a_surrogate_pair_is_read() -> None:
    assert load_all(json.dumps({"note": "\U0001f600"})) == [{"note": "\U0001f600"}]


def test_few_aliases_have_the_value_of_their_anchor() -> None:
    text = "kind: Pod\nmetadata: {labels: &a {app: x}}\nspec: {containers: [], nodeSelector: {<<: *a, disk: ssd}}"
    (found,) = typed_workloads("file", text, "team-a")
    assert isinstance(found, Workload)
    assert found.created["spec"]["nodeSelector"] == {"app": "x", "disk": "ssd"}


@pytest.mark.parametrize("tag", ["", "!!int ", "!!float "])
def test_a_number_with_colons_is_text_as_for_kubectl(tag: str) -> None:
    """PyYAML would read it as a number to base 60. The time for this grows faster than the number of colons."""
    assert load_all(f"[{tag}1:30, {tag}1:30.5, 90]") == [["1:30", "1:30.5", 90]]


def test_built_in_objects_that_create_no_pods_are_skipped() -> None:
    """`check` accepts a whole bundle of objects, for example the output of kustomize."""
    bundle = read(
        {"apiVersion": "v1", "kind": "Service", "spec": {"ports": []}},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"},
        {"apiVersion": "apps/v1", "kind": "ControllerRevision", "data": TEMPLATE},
        {"apiVersion": "v1", "kind": "PodTemplate", "template": TEMPLATE},
        vcuda_pod(),
    )
    assert [workload.kind for workload in bundle] == ["Pod"]


@cases(
    "text",
    another_template="kind: SealedSecret\nspec: {template: {type: Opaque}}",
    no_containers="kind: X\nspec: {jobTemplate: {spec: {}}, template: {spec: {replicas: 1}}}",
    a_list="kind: X\nspec: {template: {spec: [containers]}}",
    a_template_that_is_null="kind: X\nspec: [{template: null}]",
    a_rollout_of_another_objects_pods="kind: Rollout\nspec: {workloadRef: {kind: Deployment, name: train}}",
    no_spec="apiVersion: example.com/v1\nkind: X",
)
def test_another_object_without_a_pod_template_is_skipped(text: str) -> None:
    found = unread(text)
    assert (found.malformed, found.reason) == (False, NO_TEMPLATE)


def test_a_bad_object_fails_alone() -> None:
    bundle = yaml.safe_dump_all([vcuda_pod(), {"kind": "Pod", "spec": 5}, [], vcuda_pod()])
    found = typed_workloads("file", bundle, "team-a")
    assert [isinstance(each, Workload) for each in found] == [True, False, False, True]


def test_a_null_field_counts_as_absent(path: Path) -> None:
    """Manifests that are written by hand or by templates may have null fields."""
    path.write_text(yaml.safe_dump(vcuda_pod(nodeName=None)))
    (found,) = read_workloads([path], "team-a")
    assert isinstance(found, Workload)
    assert "nodeName" not in found.created["spec"]


def test_the_position_of_a_fault_names_file_and_document(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(vcuda_pod()))
    listed = {"kind": "List", "items": [{"kind": "X", "spec": {"replicas": -1, "template": TEMPLATE}}]}
    bad.write_text(yaml.safe_dump_all([vcuda_pod(), listed]))
    assert len(read_workloads([path, path], "team-a")) == 2
    *_, found = read_workloads([path, bad], "team-a")
    assert isinstance(found, Unread)
    assert found.reason == f"{bad}, document 2: the number of pods must be between 0 and 10000; got -1"
