"""Where the image comes from is said in one place, and everything that runs it follows that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.rendered import EVERY, IMAGE, MANIFESTS, Json, composed, container, copied, label, pod_specs, rendered

NAME, TAG = "registry.example.com:5000/team/quota", "1.2.3"
CHOSEN = [{"name": IMAGE, "newName": NAME, "newTag": TAG}]
NOT_OURS = {"Deployment/vcuda-scheduler"}
"""What runs Kubernetes' own image."""

every_overlay = pytest.mark.parametrize("overlay", EVERY, ids=lambda overlay: overlay.name)


def images(objects: Sequence[Json]) -> dict[str, str]:
    """The image of everything that makes pods, Kubernetes' own aside."""
    found = {label(workload): container(workload)["image"] for workload, _ in pod_specs(objects)}
    return {name: image for name, image in found.items() if name not in NOT_OURS}


@every_overlay
def test_an_image_that_the_base_names_is_what_everything_runs(tmp_path: Path, overlay: Path) -> None:
    manifests = copied(tmp_path)
    file = manifests / "base" / "kustomization.yaml"
    file.write_text(json.dumps({**yaml.safe_load(file.read_text()), "images": CHOSEN}))
    found = images(rendered(manifests / overlay.relative_to(MANIFESTS)))
    assert found == dict.fromkeys(images(rendered(overlay)), f"{NAME}:{TAG}")


@every_overlay
def test_an_image_that_a_kustomization_on_top_names_is_what_everything_runs(tmp_path: Path, overlay: Path) -> None:
    manifests = copied(tmp_path)
    on_top = manifests / "on-top"
    on_top.mkdir()
    resources = [f"../{overlay.relative_to(MANIFESTS)}"]
    (on_top / "kustomization.yaml").write_text(json.dumps({"resources": resources, "images": CHOSEN}))
    assert images(rendered(on_top)) == dict.fromkeys(images(rendered(overlay)), f"{NAME}:{TAG}")


def test_an_image_that_is_named_beside_the_components_is_what_everything_runs(tmp_path: Path) -> None:
    both = composed(tmp_path, ["scheduler", "enforce-audit"])
    named = images(rendered(both))
    file = both / "kustomization.yaml"
    beside = both.with_name("beside")
    beside.mkdir()
    (beside / file.name).write_text(json.dumps({**json.loads(file.read_text()), "images": CHOSEN}))
    assert images(rendered(beside)) == dict.fromkeys(named, f"{NAME}:{TAG}")
