"""Tests that ``vcuda-webhook serve --standalone`` limits ResourceClaims to one GPU model, and charges them."""

import json
from collections.abc import Iterator

import pytest
import yaml

from examples.claims import HAMI, NVIDIA, claim, entry, published, share
from tests.builders import Manifest
from tests.integration.reviews import Json, card_pod
from tests.processes import WebhookProcess, serving
from vcuda.claims.names import API_VERSION
from vcuda.claims.pin import ClaimPin, write_pin

GROUP, VERSION = API_VERSION.split("/")
CLAIM_KIND = {"group": GROUP, "version": VERSION, "kind": "ResourceClaim"}
CONFIG = {
    "gpu_quota": "{team-a: {quota: {M40: 8}}, crowd: {quota: {A100: 10}}, full: {quota: {M40: 2}}}",
    "gpu_units": "{deviceclass/acme.com: {cards: 0.5}}",
}


def in_namespace(manifest: Manifest, namespace: str, name: str = "train") -> Manifest:
    return {**manifest, "metadata": {"name": name, "namespace": namespace}}


def held(count: int = 1) -> Manifest:
    return claim(entry(NVIDIA, write_pin(ClaimPin(NVIDIA, ("m40",))), count=count))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebhookProcess]:
    directory = tmp_path_factory.mktemp("cluster")
    quota, nodes = directory / "gpuquota.yaml", directory / "cluster.yaml"
    quota.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": CONFIG}))
    stored = in_namespace(held(), "full", "there")
    selectors = [{"cel": {"expression": 'device.driver == "gpu.nvidia.com"'}}]
    acme = {"apiVersion": API_VERSION, "kind": "DeviceClass", "metadata": {"name": "acme.com"}}
    classes = [{**acme, "spec": {"selectors": selectors}}]
    nodes.write_text(json.dumps(published(*classes, stored)))
    with serving("--standalone", "--quota", quota, "--nodes", nodes) as running:
        yield running


def review(server: WebhookProcess, manifest: Manifest, **fields: object) -> Json:
    kind = {"group": GROUP, "version": VERSION, "kind": manifest["kind"]}
    return server.admit(manifest, kind=kind, **fields)


def test_a_claim_is_pinned_and_charged_together_with_pods(server: WebhookProcess) -> None:
    asked = in_namespace(claim(share(HAMI, cores="50", memory="1Gi")), "team-a")
    proposed = server.review("/mutate", asked, kind=CLAIM_KIND)
    assert proposed["auditAnnotations"]["model"] == "M40"
    pinned = server.admit(asked, kind=CLAIM_KIND)
    assert pinned["allowed"]
    rejected = server.admit(card_pod("beside", "team-a", cards=8))
    assert "requested: 8 cards, used: 0.5 (0.5 pending), limited: 8, 0.5 more needed" in rejected["status"]["message"]


def test_a_stored_claim_is_already_charged(server: WebhookProcess) -> None:
    rejected = review(server, in_namespace(held(2), "full"))
    assert "requested: 2 cards, used: 1 (0 pending), limited: 2, 1 more needed" in rejected["status"]["message"]


def test_the_units_of_the_config_map_price_its_classes(server: WebhookProcess) -> None:
    half = review(server, in_namespace(claim(entry("acme.com", count=17)), "team-a"))
    assert "requested: 8.5 cards" in half["status"]["message"]
    rejected = review(server, in_namespace(claim(entry("nobody.example.com")), "team-a"))
    assert rejected["status"]["code"] == 422
    assert rejected["status"]["details"]["causes"][0]["field"] == "spec.devices.requests[0].exactly.deviceClassName"
