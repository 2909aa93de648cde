"""The manifests as ``kubectl kustomize`` prints them."""

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kubectl import kubectl
from tests.match_conditions import declared

Json = dict[str, Any]

MANIFESTS = Path(__file__).parents[1] / "manifests"
BASE = MANIFESTS / "base"
OVERLAYS = tuple(sorted(found.parent for found in MANIFESTS.glob("overlays/*/kustomization.yaml")))
EVERY = (BASE, *OVERLAYS)

SYSTEM_NAMESPACE = "vcuda-quota"
NODE_NAMESPACE = "vcuda-quota-node"
IMAGE = "vcuda-quota"
WORKLOADS = ("Deployment", "DaemonSet", "CronJob", "Job")


@functools.cache
def rendered_text(directory: Path) -> str:
    done = subprocess.run((kubectl(), "kustomize", directory), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def rendered(directory: Path) -> list[Json]:
    """Return every object in the order of creation. The objects are copies, so the caller may change them."""
    return [found for found in yaml.safe_load_all(rendered_text(directory)) if found]


def overlay_of(name: str) -> list[Json]:
    return rendered(MANIFESTS / "overlays" / name)


def copied(directory: Path) -> Path:
    return Path(shutil.copytree(MANIFESTS, directory / "manifests"))


def composed(directory: Path, components: Sequence[str]) -> Path:
    target = copied(directory)
    both = {"resources": ["../base"], "components": [f"../components/{name}" for name in components]}
    (target / "both").mkdir()
    (target / "both" / "kustomization.yaml").write_text(json.dumps(both))
    return target / "both"


def one(objects: Sequence[Json], kind: str, name: str) -> Json:
    [found] = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def label(found: Json) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def webhooks(objects: Sequence[Json]) -> dict[str, Json]:
    configurations = [each for each in objects if each["kind"].endswith("WebhookConfiguration")]
    return {hook["name"]: hook for each in configurations for hook in declared(each)}


def pod_specs(objects: Sequence[Json]) -> Iterator[tuple[Json, Json]]:
    for found in objects:
        if found["kind"] in WORKLOADS:
            yield found, pod_spec(found)


def ours(objects: Sequence[Json]) -> list[Json]:
    return [found for found, _ in pod_specs(objects) if container(found)["image"].partition(":")[0] == IMAGE]


def images(objects: Sequence[Json]) -> dict[str, str]:
    """Return the image of every workload by KIND/NAME, except the scheduler, whose image is from Kubernetes."""
    found = {label(workload): container(workload)["image"] for workload, _ in pod_specs(objects)}
    return {name: image for name, image in found.items() if name != "Deployment/vcuda-scheduler"}


def pod_template(workload: Json) -> Json:
    spec = workload["spec"]["jobTemplate"]["spec"] if workload["kind"] == "CronJob" else workload["spec"]
    found: Json = spec["template"]
    return found


def pod_spec(workload: Json) -> Json:
    found: Json = pod_template(workload)["spec"]
    return found


def container(workload: Json) -> Json:
    [found] = pod_spec(workload)["containers"]
    return dict(found)
