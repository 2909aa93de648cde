"""Tests of the example manifests in docs/neighbours.md and docs/workloads.md. The webhook must charge their pods."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.documented import documented, documented_objects
from webhook.cli import main

QUOTA = "team-a: {quota: {H100: 8, T4: 8, A100: 8}}"
"""The quota for the documented manifests. The order of models has no effect, because each manifest names its model."""
COUNTED = {"Deployment": (1, "A100"), "Notebook": (1, "T4"), "PyTorchJob": (2, "A100"), "RayCluster": (2, "A100")}
"""Maps each kind to the number of GPU pods that its documented manifest creates, and to their model."""


def test_every_manifest_of_the_pages_names_its_kind() -> None:
    found = documented_objects()
    assert len(found) >= 15
    for each in found:
        assert each.keys() >= {"apiVersion", "kind"}
        assert each["kind"] == "Kustomization" or each["metadata"]["name"]


@pytest.mark.parametrize("kind", COUNTED)
def test_the_pods_of_a_documented_workload_are_charged_to_the_model_that_they_name(kind: str, tmp_path: Path) -> None:
    manifest, quota = tmp_path / "manifest.yaml", tmp_path / "quota.yaml"
    manifest.write_text(yaml.safe_dump(documented(kind)))
    quota.write_text(QUOTA)
    done = CliRunner().invoke(main, ["check", "--quota", str(quota), "-o", "json", str(manifest)])
    assert done.exit_code == 0, done.output
    judged = [found for found in json.loads(done.stdout)["objects"] if found["decision"] != "no GPU"]
    assert [(found["count"], found["model"]) for found in judged] == [COUNTED[kind]]


def test_the_flavors_and_the_node_pool_carry_the_models_label() -> None:
    flavors = [each for each in documented_objects() if each["kind"] == "ResourceFlavor"]
    labels = [each["spec"]["nodeLabels"] for each in flavors]
    labels.append(documented("NodePool")["spec"]["template"]["metadata"]["labels"])
    assert [found.get("gaia.tencent.com/gpu-model") for found in labels] == ["A100", "T4", "A100"]
