"""Tests of the command `check` for ResourceClaims, ResourceClaimTemplates, and the pods that name them."""

import json
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from examples.claims import A100, HAMI, M40, NVIDIA, claim, entry, published, share, spec
from tests.builders import Manifest, container, pod, vcuda_pod
from tests.tables import cases
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.quota.model import Charge
from webhook.cli import main

QUOTA = """
team-a: {order: [A100, M40], quota: {M40: 2, A100: 3}}
team-w: {mode: warn, quota: {A100: 1}}
kube-system: {quota: {A100: 1}}
"""

Rows = list[dict[str, Any]]


def check(directory: Path, *manifests: Manifest, stored: tuple[Manifest, ...] = (), quota: str = QUOTA) -> Rows:
    """Run `check` for team-a in a cluster with one M40 and one A100. Return the objects in its JSON output."""
    files = {name: directory / name for name in ("quota", "nodes", "manifests")}
    files["quota"].write_text(quota)
    files["nodes"].write_text(yaml.safe_dump(published(*stored)))
    files["manifests"].write_text(yaml.safe_dump_all(manifests))
    told = [f"--quota={files['quota']}", f"--nodes={files['nodes']}", "-n", "team-a", "-o", "json"]
    result = CliRunner().invoke(main, ["check", *told, str(files["manifests"])], catch_exceptions=False)
    rows: Rows = json.loads(result.stdout)["objects"]
    assert result.exit_code == any(row["decision"] == "rejected" for row in rows)
    return rows


def charge_of(row: dict[str, Any]) -> str:
    """Return the charge of an object, written as in the table that `check` prints."""
    return str(Charge(round(row["cards"] * 100), row["memory_mib"])) if row["cards"] else ""


def short(rows: Rows) -> list[str]:
    return [f"{row['object']}: {row['count']} {row['decision']} {row['model']}".rstrip() for row in rows]


def of_product(product: str) -> Manifest:
    return entry(NVIDIA, f'device.attributes["{NVIDIA}"].productName == "{product}"')


def template(*requests: Manifest, name: str = "gpus", **metadata: str) -> Manifest:
    asked = {"spec": spec(*(requests or (entry(),)))}
    about = {"name": name, **metadata}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": about, "spec": asked}


def claiming(*templates: str, **metadata: Any) -> Manifest:
    named = [{"name": f"c{index}", "resourceClaimTemplateName": each} for index, each in enumerate(templates)]
    return pod(container(), resourceClaims=named, metadata={"name": "train", **metadata})


def deployment(replicas: int, made: Manifest) -> Manifest:
    about = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}}
    return {**about, "spec": {"replicas": replicas, "template": {"spec": made["spec"]}}}


@cases(
    "manifest, decision, model, charge",
    the_first_in_the_order=(claim(), "admitted", "A100", "1 card"),
    a_product_that_it_demands=(claim(of_product(M40)), "admitted", "M40", "1 card"),
    a_share=(claim(share(HAMI, cores="30", memory="4000Mi")), "admitted", "A100", "0.3 cards, 4000 MiB"),
    a_MIG_slice=(
        claim(entry("mig.nvidia.com", f"device.attributes['{NVIDIA}'].profile == '3g.20gb'")),
        *("admitted", "A100", "0.5 cards, 20480 MiB"),
    ),
    more_than_there_is=(claim(entry(count=4)), "rejected", "A100", "4 cards"),
    all_there_are=(claim(entry(allocationMode="All")), "rejected", "", "1 card"),
    an_unknown_class=(claim(entry("gpu.example.com")), "rejected", "", ""),
    no_devices=({**claim(), "spec": {}}, "no GPU", "", ""),
    not_limited=(claim(namespace="sandbox"), "not limited", "", "1 card"),
    a_quota_that_only_warns=(claim(entry(count=2), namespace="team-w"), "admitted", "A100", "2 cards"),
    a_system_namespace=(claim(namespace="kube-system"), "counted", "", "1 card"),
    a_template=(template(), "admitted", "", ""),
    a_template_that_could_never_fit=(template(entry(count=4)), "rejected", "", ""),
    a_template_without_limit=(template(namespace="sandbox"), "not limited", "", ""),
)
def test_a_claim_or_template_is_decided_as_the_webhook_decides_it(
    manifest: Manifest, decision: str, model: str, charge: str, tmp_path: Path
) -> None:
    (row,) = check(tmp_path, manifest)
    assert (row["decision"], row["model"], charge_of(row)) == (decision, model, charge)
    assert row["object"] == f"{manifest['kind']}/{manifest['metadata']['name']}"


def test_claims_are_decided_together_with_pods_and_claims_before_them(tmp_path: Path) -> None:
    on_a100 = vcuda_pod({"nvidia.com/gpu": 2}, nodeSelector={"gaia.tencent.com/gpu-model": "A100"})
    rows = check(tmp_path, on_a100, *[claim(of_product(A100), name=f"c{number}") for number in (1, 2)])
    assert short(rows) == [
        "Pod/train-0: 1 admitted A100",
        "ResourceClaim/c1: 1 admitted A100",
        "ResourceClaim/c2: 1 rejected A100",
    ]
    assert "used: 3 (3 pending), limited: 3, 1 more needed" in rows[-1]["reason"]


def test_the_claims_of_a_pod_follow_it_in_the_table(tmp_path: Path) -> None:
    """The template of a claim may follow the pod in the manifest, because Kubernetes creates the claims later."""
    rows = check(tmp_path, claiming("gpus", "big"), template(), template(of_product(M40), name="big"))
    assert short(rows)[:3] == [
        "Pod/train: 1 admitted",
        "ResourceClaim/train-c0-*: 1 admitted A100",
        "ResourceClaim/train-c1-*: 1 admitted M40",
    ]
    assert [charge_of(row) for row in rows[:3]] == ["", "1 card", "1 card"]


def test_each_replica_has_its_own_claim(tmp_path: Path) -> None:
    """If the quota has no room for a pod's claim, the pod is stored anyway and waits for the claim."""
    rows = check(tmp_path, deployment(7, claiming("gpus")), stored=(template(namespace="team-a"),))
    assert short(rows) == [
        "Deployment/web: 7 admitted",
        "ResourceClaim/web-*-c0-*: 2 admitted A100",
        "ResourceClaim/web-*-c0-*: 1 admitted A100",
        "ResourceClaim/web-*-c0-*: 1 admitted M40",
        "ResourceClaim/web-*-c0-*: 1 admitted M40",
        "ResourceClaim/web-*-c0-*: 2 rejected A100",
    ]


def test_a_claim_that_can_never_fit_is_rejected_after_its_pod_is_admitted(tmp_path: Path) -> None:
    stored = (template(namespace="team-a"), template(entry(count=9), name="too-many", namespace="team-a"))
    rows = check(tmp_path, claiming("gpus", "too-many"), stored=stored)
    assert short(rows) == [
        "Pod/train: 1 admitted",
        "ResourceClaim/train-c0-*: 1 admitted A100",
        "ResourceClaim/train-c1-*: 1 rejected A100",
    ]
    assert "can never fit" in rows[2]["reason"]


def test_a_rejected_pod_gets_no_claims(tmp_path: Path) -> None:
    rejected = claiming("gpus")
    rejected["spec"]["containers"] = [container({"nvidia.com/gpu": 9})]
    assert short(check(tmp_path, rejected, template())) == [
        "Pod/train: 1 rejected A100",
        "ResourceClaimTemplate/gpus: 1 admitted",
    ]


@cases("home, decisions", limited=("team-a", ["admitted", "unknown"]), not_limited=("sandbox", ["no GPU"]))
def test_a_missing_template_is_reported_for_the_claim(home: str, decisions: list[str], tmp_path: Path) -> None:
    rows = check(tmp_path, claiming("elsewhere", namespace=home))
    assert [row["decision"] for row in rows] == decisions
    told = "the decision depends on objects that are not in the given files: ResourceClaimTemplate elsewhere"
    assert [row["reason"] for row in rows[1:]] == [told] * len(rows[1:])


def test_stored_claims_are_charged_first(tmp_path: Path) -> None:
    pin = write_pin(ClaimPin(NVIDIA, ("a100",)))
    stored = claim(entry(NVIDIA, pin, count=3), namespace="team-a", name="there", uid="u-1")
    on_a100 = claim(of_product(A100))
    assert short(check(tmp_path, on_a100)) == ["ResourceClaim/train-gpu: 1 admitted A100"]
    (row,) = check(tmp_path, on_a100, stored=(stored,))
    assert (row["decision"], "used: 3 (0 pending)" in row["reason"]) == ("rejected", True)


def test_gpu_models_rows_set_the_products_of_claims_and_the_value_of_a_pods_cards(tmp_path: Path) -> None:
    models = "{Shared: {products: [NVIDIA-A100-*], cards: 0.25}}"
    data = {"gpu_quota": "team-a: {quota: {Shared: 2}}", "gpu_models": models}
    quota = yaml.safe_dump({"kind": "ConfigMap", "data": data})
    claimed, asked = check(tmp_path, claim(of_product(A100)), vcuda_pod({"nvidia.com/gpu": 2}), quota=quota)
    assert (claimed["decision"], claimed["model"]) == ("admitted", "Shared")
    assert (asked["decision"], asked["model"], charge_of(asked)) == ("admitted", "Shared", "0.5 cards")
    by_claim = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": NVIDIA}}
    whole = {**by_claim, "spec": {"extendedResourceName": "nvidia.com/gpu"}}
    (asked,) = check(tmp_path, vcuda_pod({"nvidia.com/gpu": 2}), stored=(whole,), quota=quota)
    assert charge_of(asked) == "2 cards", "the scheduler may claim whole devices for it"


CLAIM = "apiVersion: resource.k8s.io/v1, kind: ResourceClaim"


@cases(
    "text, message",
    an_older_version=(
        "{apiVersion: resource.k8s.io/v1beta2, kind: ResourceClaim}",
        "document 1: apiVersion must be resource.k8s.io/v1; got resource.k8s.io/v1beta2",
    ),
    no_version=("kind: ResourceClaimTemplate", "document 1: apiVersion is required; it must be resource.k8s.io/v1"),
    no_list=(
        f"{{{CLAIM}, spec: {{devices: {{requests: 5}}}}}}",
        "document 1: the object is malformed: Expected `array | null`, got `int` - at `$.spec.devices.requests`",
    ),
    no_namespace=(f"{{{CLAIM}, metadata: {{namespace: A_B}}}}", "document 1: 'A_B' "),
)
def test_malformed_claims_are_reported_with_their_position(text: str, message: str, tmp_path: Path) -> None:
    quota, path = tmp_path / "quota", tmp_path / "claims"
    quota.write_text(QUOTA)
    path.write_text(text)
    result = CliRunner().invoke(main, ["check", "--quota", str(quota), "-o", "json", str(path)])
    (row,) = json.loads(result.stdout)["objects"]
    assert (result.exit_code, row["decision"]) == (2, "malformed")
    assert row["reason"].startswith(f"{path}, {message}")


def test_a_kind_of_that_name_in_another_group_is_no_claim(tmp_path: Path) -> None:
    (row,) = check(tmp_path, {"apiVersion": "example.com/v1", "kind": "ResourceClaim", "metadata": {"name": "x"}})
    assert row["decision"] == "skipped"
