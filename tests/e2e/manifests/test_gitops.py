"""Tests that GitOps tools report no drift, although our Jobs and the controller change applied objects.

Flux uses server-side apply with force, and compares the stored object with the result of a dry run
(`github.com/fluxcd/pkg/ssa`, `ResourceManager.Diff`). Argo CD uses a three-way merge, as `kubectl diff` does.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import SYSTEM_NAMESPACE, await_enforced
from tests.e2e.manifests.system import NODE, System, applied, apply, kubectl_k
from tests.rendered import label

pytestmark = pytest.mark.timeout(240)

FLUX = "kustomize-controller"


@pytest.fixture
def system(admin: Cluster, tmp_path: Path) -> Iterator[System]:
    """The base, with components for which a Job and the controller write more objects and fields."""
    admin.create_node(NODE, {MODEL: "M40"})
    with applied(admin, tmp_path, "client-certificates", "page") as system:
        yield system
    admin.delete_node(NODE)


def manifests(system: System) -> list[Json]:
    """Return the objects of the manifests, as a GitOps tool would read them from its repository."""
    return list(yaml.safe_load_all(kubectl_k(system.cluster, "kustomize", system.kustomization).stdout))


def apply_as_flux(cluster: Cluster, manifest: Json, **query: str) -> Json:
    path = f"{cluster.path_of(manifest)}/{manifest['metadata']['name']}"
    how = {"content_type": "application/apply-patch+yaml", "fieldManager": FLUX, "force": "true"}
    return cluster.rest.send("PATCH", path, manifest, **how, **query).ok()


def drifted(cluster: Cluster, objects: Sequence[Json]) -> list[str]:
    found = []
    for each in objects:
        live = cluster.rest.get(f"{cluster.path_of(each)}/{each['metadata']['name']}")
        if compared(live) != compared(apply_as_flux(cluster, each, dryRun="All")):
            found.append(label(each))
    return found


def compared(found: Json) -> Json:
    metadata = {key: found["metadata"].get(key) for key in ("labels", "annotations")}
    return {**{key: part for key, part in found.items() if key != "status"}, "metadata": metadata}


def drift_of_flux(system: System) -> list[str]:
    return drifted(system.cluster, manifests(system))


def drift_of_argo_cd(system: System) -> list[str]:
    done = kubectl_k(system.cluster, "diff", "-k", system.kustomization)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def await_observed(system: System) -> None:
    """Return when Kubernetes has processed all Deployments, because it first writes an annotation into each of them."""
    for each in (found for found in system.objects if found["kind"] == "Deployment"):
        path, name = system.cluster.path_of(each), each["metadata"]["name"]
        system.cluster.await_object(
            path, name, lambda found: found["status"].get("observedGeneration") == found["metadata"]["generation"]
        )


@pytest.mark.parametrize("drift", [drift_of_flux, drift_of_argo_cd])
def test_no_drift_is_found_before_and_after_the_webhooks_are_registered(
    admin: Cluster, system: System, drift: Callable[[System], list[str]]
) -> None:
    if drift is drift_of_flux:
        for each in manifests(system):
            apply_as_flux(admin, each)
    else:
        apply(admin, system.kustomization)
    await_observed(system)
    assert drift(system) == []
    with system.serving(1), system.controller() as controller:
        controller.await_synced()
        await_enforced(admin, SYSTEM_NAMESPACE, enforced=False)  # the controller writes this label when it runs
        assert drift(system) == []
