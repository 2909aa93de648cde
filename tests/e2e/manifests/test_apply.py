"""Applies the manifests to a real API server twice: as an installation, and as an upgrade."""

import base64
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from certs.registration import ANNOTATION
from tests.e2e.cluster import Cluster, Json
from tests.e2e.manifests.system import apply, remove_left_behind
from tests.rendered import BASE, EVERY, SYSTEM_NAMESPACE, label, rendered

OTHERS = ("cert-manager.io", "monitoring.coreos.com")
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
BUNDLE = base64.b64encode(b"-----BEGIN CERTIFICATE-----\nthat is written by the rotation\n").decode()
WAYS = pytest.mark.parametrize("flags", [("--server-side",), ()], ids=["server-side", "client-side"])


def define_kinds_of_others(cluster: Cluster, objects: Sequence[Json]) -> None:
    """Define the kinds of other projects that the manifests use, without schemas, and create their namespace."""
    for kind, api_version in {(each["kind"], each["apiVersion"]) for each in objects}:
        group, _, version = api_version.partition("/")
        if group in OTHERS:
            cluster.apply(custom_resource(kind, group, version))
            cluster.await_collection("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", established(kind))
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


def established(kind: str) -> Callable[[list[Json]], bool]:

    def holds(definitions: list[Json]) -> bool:
        [found] = [each for each in definitions if each["spec"]["names"]["kind"] == kind]
        conditions = found.get("status", {}).get("conditions") or []  # `conditions` is null before the first apply
        return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

    return holds


@pytest.mark.parametrize("overlay", EVERY, ids=lambda each: each.name)
def test_every_overlay_applies(admin: Cluster, overlay: Path) -> None:
    objects = rendered(overlay)
    define_kinds_of_others(admin, objects)
    remove_left_behind(admin)
    told = apply(admin, overlay, "--server-side", "--force-conflicts").splitlines()
    assert len(told) == len(objects)
    assert all(line.endswith(" serverside-applied") for line in told), told


@WAYS
def test_an_upgrade_keeps_the_ca_bundles_and_all_equal_objects(admin: Cluster, flags: tuple[str, ...]) -> None:
    remove_left_behind(admin)
    # Earlier tests may have left objects whose fields belong to other field managers. So the first apply takes over
    # these fields by force.
    forced = ("--force-conflicts",) if flags else ()
    apply(admin, BASE, *flags, *forced)
    for path in ("mutatingwebhookconfigurations/00-vcuda-quota", "validatingwebhookconfigurations/vcuda-quota"):
        write_bundles(admin, f"{ADMISSION}/{path}")
    before = stored(admin, rendered(BASE))
    apply(admin, BASE, *flags)
    after = stored(admin, rendered(BASE))
    assert {name: found["metadata"]["resourceVersion"] for name, found in after.items()} == {
        name: found["metadata"]["resourceVersion"] for name, found in before.items()
    }
    bundles = [hook["clientConfig"]["caBundle"] for found in after.values() for hook in found.get("webhooks", [])]
    # The system has three webhooks for pods and the quota, and two webhooks for claims.
    assert bundles == [BUNDLE] * 5


def write_bundles(cluster: Cluster, path: str) -> None:
    """Write the webhooks that the configuration's annotation declares, with a caBundle, as vcuda-certs does."""
    declared = yaml.safe_load(cluster.rest.get(path)["metadata"]["annotations"][ANNOTATION])
    for hook in declared:
        hook["clientConfig"]["caBundle"] = BUNDLE
    cluster.rest.json_patch(path, [{"op": "add", "path": "/webhooks", "value": declared}])


def stored(cluster: Cluster, objects: Sequence[Json]) -> dict[str, Json]:
    """Return the stored objects, except those of kinds whose status Kubernetes itself changes."""
    settled = [each for each in objects if each["kind"] not in ("Deployment", "DaemonSet", "Job", "CronJob")]
    return {
        f"{each['metadata'].get('namespace', '')} {label(each)}": cluster.rest.get(
            f"{cluster.path_of(each)}/{each['metadata']['name']}"
        )
        for each in settled
        if each["kind"] not in ("PodDisruptionBudget", "Namespace", "FlowSchema")
    }


@pytest.mark.parametrize("account", ["vcuda-webhook", "vcuda-controller"])
def test_requests_for_ledgers_have_a_priority_level_of_their_own(admin: Cluster, account: str) -> None:
    apply(admin, BASE, "--server-side", "--force-conflicts")
    schema = admin.rest.get("/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/vcuda-quota")
    with closing(Cluster(admin.control_plane, admin.service_account_token(SYSTEM_NAMESPACE, account))) as own:
        ledger = own.rest.send("GET", "/api/v1/namespaces/vcuda-quota-ledgers/configmaps/gpu-ledger-team-a")
        other = own.rest.send("GET", "/api/v1/nodes")
    assert ledger.headers["X-Kubernetes-PF-FlowSchema-UID"] == schema["metadata"]["uid"]
    assert other.headers["X-Kubernetes-PF-FlowSchema-UID"] != schema["metadata"]["uid"]
