"""Tests of the files that describe a cluster to the command `check`: the quota, nodes, devices, and stored objects."""

from pathlib import Path

import pytest
import yaml

from examples.claims import A100, M40, NVIDIA, claim, entry, published, template
from tests.builders import LABELS, MODEL, Manifest, stored_pod, vcuda_pod
from tests.tables import cases
from vcuda.claims.names import API_VERSION
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.errors import BadInput, QuotaFault
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Charge, Limit
from vcuda.requests.resources import BUILT_IN
from webhook.check.check import read_workloads
from webhook.check.files import OfflineCluster, read_cluster, read_quota, read_stored_objects


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


def cluster(path: Path, *stored: Manifest) -> OfflineCluster:
    quota = path.with_name("quota.yaml")
    quota.write_text("{team-a: {quota: {M40: 8, A100: 8}}, team-b: {quota: {M40: 8}}}")
    path.write_text(yaml.safe_dump(published(*stored)))
    return read_cluster(quota, path, PinSettings())


def held_claim(model: str, **metadata: object) -> Manifest:
    pin = write_pin(ClaimPin(NVIDIA, (model.lower(),)))
    return claim(entry(NVIDIA, pin), **{"namespace": "team-a", "uid": "claim-uid", **metadata})


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_the_error_for_an_unreadable_file_names_it(content: bytes | None, path: Path) -> None:
    if content:
        path.write_bytes(content)
    for reading in (lambda: read_workloads([path], "team-a"), lambda: read_quota(path)):
        with pytest.raises(BadInput, match="cannot be read"):
            reading()


# Tests of the quota file


@cases(
    "text",
    the_document="team-a: {quota: {M40: 8}}",
    in_JSON='{"team-a": {"quota": {"M40": 8}}}',
    the_ConfigMap="kind: ConfigMap\ndata:\n  gpu_quota: |\n    team-a: {quota: {M40: 8}}",
    both='{"kind": "ConfigMap", "data": {"gpu_quota": "{\\"team-a\\": {\\"quota\\": {\\"M40\\": 8}}}"}}',
)
def test_a_quota_file_is_the_document_or_its_config_map(text: str, path: Path) -> None:
    path.write_text(text)
    assert read_quota(path).quota.namespaces["team-a"].limits == {"M40": Limit(800)}


def test_the_teams_of_a_config_map_are_read(path: Path) -> None:
    teams = "vision: {namespaces: [a], quota: {M40: 8}}"
    path.write_text(f'{{kind: ConfigMap, data: {{gpu_quota: "{{}}", gpu_teams: "{teams}"}}}}')
    found = read_quota(path).quota.for_namespace("a")
    assert found is not None
    assert found.team is not None


def test_a_config_maps_further_keys_are_read_too(path: Path) -> None:
    path.write_text('{kind: ConfigMap, data: {gpu_quota: "{}", gpu_units: "{a.b/c: {cards: 1}}"}}')
    assert read_quota(path).resources.own_units == {"a.b/c": Charge(100, 0, 100)}


@pytest.mark.parametrize("data", ["[]", "5", "{gpu_quota: {team-a: {quota: {M40: 8}}}}", "{gpu_quota: 5}"])
def test_the_data_of_a_config_map_is_text(data: str, path: Path) -> None:
    path.write_text(f"kind: ConfigMap\ndata: {data}")
    with pytest.raises(BadInput, match="malformed: "):
        read_quota(path)


@cases(
    "text, message",
    no_data=("kind: ConfigMap", "the ConfigMap has no key gpu_quota"),
    another_key=("kind: ConfigMap\ndata: {other: x}", "the ConfigMap has no key gpu_quota"),
    an_empty_file=("", "must not be empty; write {} to limit no namespace"),
    only_blanks=("\n \n", "must not be empty; write {} to limit no namespace"),
)
def test_a_file_without_a_quota_is_rejected(text: str, message: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_quota(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("text", ["{", "team-a: {quota: {M40: -8}}", "team-a: {quota: {M40: 2024-13-45}}", "[" * 5000])
def test_a_malformed_quota_file_is_rejected(text: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(QuotaFault):
        read_quota(path)


# Tests of files with nodes and devices


def test_nodes_without_a_label_are_read_too(path: Path) -> None:
    labelled = {"kind": "Node", "metadata": {"name": "a", "labels": {MODEL: "M40"}}}
    path.write_text(yaml.safe_dump({"kind": "List", "items": [labelled, {"kind": "Node", "metadata": {"name": "b"}}]}))
    found = read_stored_objects(path, LABELS, BUILT_IN).nodes
    assert (found.labels, found.models) == ({"a": {MODEL: "M40"}, "b": {}}, {"M40"})


STALE = {**claim(namespace="team-a"), "apiVersion": "resource.k8s.io/v1beta1"}
NEGATIVE = {"name": "gpu-0", "capacity": {"memory": {"value": "lots"}}}
SLICE = {"apiVersion": API_VERSION, "kind": "ResourceSlice", "metadata": {"name": "s"}, "spec": {"devices": [NEGATIVE]}}


@cases(
    "manifest, message",
    another_kind=(
        {"kind": "Service"},
        "kind must be one of Node, ResourceSlice, DeviceClass, ResourceClaimTemplate, ResourceClaim, Pod; got Service",
    ),
    labels_in_a_list=({"kind": "Node", "metadata": {"name": "a", "labels": []}}, "the object is malformed: "),
    no_name=({"kind": "Node"}, "the Node has no name"),
    no_namespace=(claim(), "the ResourceClaim train-gpu has no namespace"),
    a_pod_of_no_namespace=(vcuda_pod(), "the Pod train-0 has no namespace"),
    an_older_version=(STALE, f"apiVersion must be {API_VERSION}; got resource.k8s.io/v1beta1"),
    no_version=({"kind": "DeviceClass"}, f"apiVersion is required; it must be {API_VERSION} for a DeviceClass"),
    no_quantity=(SLICE, "the ResourceSlice is malformed: "),
)
def test_a_malformed_object_is_reported_with_its_position(manifest: Manifest, message: str, path: Path) -> None:
    path.write_text(yaml.safe_dump_all([{"kind": "Node", "metadata": {"name": "a"}}, manifest]))
    with pytest.raises(BadInput) as caught:
        read_stored_objects(path, LABELS, BUILT_IN)
    assert str(caught.value).startswith(f"{path}, document 2: {message}")


# Tests of files with stored objects


def test_devices_and_classes_are_read_as_drivers_publish_them(path: Path) -> None:
    policy = cluster(path).policy.claim_policy
    assert policy.products.model_of(A100) == "A100"
    assert policy.products.model_of(M40) == "M40"
    assert policy.devices.classes[NVIDIA].driver == NVIDIA


def test_templates_are_known_by_namespace_and_name(path: Path) -> None:
    found = cluster(path, {**template(), "metadata": {"name": "one", "namespace": "team-a"}}).templates
    assert [*found] == [("team-a", "one")]


ENDED = {**stored_pod({"nvidia.com/gpu": 1}, uid="x"), "status": {"phase": "Succeeded"}}


def in_team_a(pod: Manifest, **status: object) -> Manifest:
    return {
        **pod,
        "metadata": {**pod["metadata"], "namespace": "team-a"},
        "status": {**pod.get("status", {}), **status},
    }


GPU_POD = in_team_a(stored_pod({"nvidia.com/gpu": 2}))
OF_POD = {"extendedResourceClaimStatus": {"resourceClaimName": "train-gpu"}}
CARD, TWO = Charge(100, 0, 100), Charge(200, 0, 200)


@cases(
    "stored, committed",
    a_claim=([held_claim("A100")], {"team-a": {"A100": CARD}}),
    a_claim_that_is_twice_in_the_file=([held_claim("A100")] * 2, {"team-a": {"A100": CARD}}),
    claims_of_two_namespaces=(
        [held_claim("A100"), held_claim("M40", namespace="team-b")],
        {"team-a": {"A100": CARD}, "team-b": {"M40": CARD}},
    ),
    a_claim_that_nobody_has_pinned=([claim(namespace="team-a")], {"team-a": {}}),
    a_pod=([GPU_POD], {"team-a": {"M40": TWO}}),
    a_pod_that_has_ended=([in_team_a(ENDED)], {"team-a": {}}),
    a_pod_and_its_own_claim=([in_team_a(GPU_POD, **OF_POD), held_claim("M40")], {"team-a": {"M40": TWO}}),
    the_scheduler_s_claim_without_its_pod=([held_claim("M40")], {"team-a": {"M40": CARD}}),
)
def test_stored_objects_are_charged_once(
    stored: list[Manifest], committed: dict[str, dict[str, Charge]], path: Path
) -> None:
    assert cluster(path, *stored).committed == committed
