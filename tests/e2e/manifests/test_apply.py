"""Tests that apply the manifests to a real API server twice: as an installation, and as an upgrade."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.manifests.system import apply, remove_left_behind
from tests.rendered import BASE, EVERY, SYSTEM_NAMESPACE, rendered

OTHERS = ("cert-manager.io", "monitoring.coreos.com")


def define_kinds_of_others(cluster: Cluster, objects: Sequence[Json]) -> None:
    """Define the kinds of other projects in the manifests, without schemas, and create their namespace."""
    for kind, api_version in {(each["kind"], each["apiVersion"]) for each in objects}:
        group, _, version = api_version.partition("/")
        if group in OTHERS:
            cluster.apply(made := custom_resource(kind, group, version))
            cluster.kubectl("wait", "--for=condition=Established", f"crd/{made['metadata']['name']}", "--timeout=30s")
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "monitoring"}})


def custom_resource(kind: str, group: str, version: str) -> Json:
    plural = f"{kind.lower()}s"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }


@pytest.mark.parametrize("overlay", EVERY, ids=lambda each: each.name)
def test_every_overlay_applies(admin: Cluster, overlay: Path) -> None:
    objects = rendered(overlay)
    define_kinds_of_others(admin, objects)
    remove_left_behind(admin)
    told = apply(admin, overlay, "--server-side", "--force-conflicts").splitlines()
    assert len(told) == len(objects)
    assert all(line.endswith(" serverside-applied") for line in told), told


@pytest.mark.parametrize("flags", [("--server-side",), ()], ids=["server-side", "client-side"])
def test_an_upgrade_writes_no_equal_object(admin: Cluster, flags: tuple[str, ...]) -> None:
    remove_left_behind(admin)
    # Earlier tests may have left objects with fields of other field managers. So the first apply takes over these
    # fields by force.
    apply(admin, BASE, *flags, *(("--force-conflicts",) if flags else ()))
    before = versions(admin, rendered(BASE))
    apply(admin, BASE, *flags)
    assert versions(admin, rendered(BASE)) == before


CHANGED = ("Deployment", "DaemonSet", "Job", "CronJob", "PodDisruptionBudget", "Namespace", "FlowSchema")
"""The kinds whose status Kubernetes itself changes."""


def versions(cluster: Cluster, objects: Sequence[Json]) -> dict[str, str]:
    """Return the resourceVersion of each stored object, except objects of the kinds in `CHANGED`."""
    paths = [f"{cluster.path_of(each)}/{each['metadata']['name']}" for each in objects if each["kind"] not in CHANGED]
    return {path: cluster.rest.get(path)["metadata"]["resourceVersion"] for path in paths}


@pytest.mark.parametrize("account", ["vcuda-webhook", "vcuda-controller"])
def test_requests_for_ledgers_have_a_priority_level_of_their_own(admin: Cluster, account: str) -> None:
    apply(admin, BASE, "--server-side", "--force-conflicts")
    schema = admin.rest.get("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/vcuda-quota")
    with closing(Cluster(admin.control_plane, admin.service_account_token(SYSTEM_NAMESPACE, account))) as own:
        ledger = own.rest.send("GET", "/api/v1/namespaces/vcuda-quota-ledgers/configmaps/gpu-ledger-team-a")
        other = own.rest.send("GET", "/api/v1/nodes")
    assert ledger.headers["X-Kubernetes-PF-FlowSchema-UID"] == schema["metadata"]["uid"]
    assert other.headers["X-Kubernetes-PF-FlowSchema-UID"] != schema["metadata"]["uid"]
