"""The webhooks that a benchmark registers: two simple ones, or vcuda quota's webhooks as the manifests install them.

vcuda quota's webhooks are registered together with its ValidatingAdmissionPolicies, as in every installation. The API
server evaluates these policies for every request.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from bench.plane import MANIFESTS, manifests
from tests.e2e.cluster import Cluster, Json
from tests.processes import eventually

REGISTRATION = MANIFESTS / "registration.yaml"
POLICIES = ("usage-policy.yaml", "policies.yaml")
PROBED, PROBE = "in-effect.quota.vcuda.io", "gpu-quota-probe"
MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"

Webhooks = Mapping[str, Sequence[Json]]
"""The items of the field `webhooks`, for each kind of webhook configuration (mutating and validating)."""


def simple(url: str, ca: Path) -> Webhooks:
    """Return a mutating and a validating webhook at ``url`` for every new pod. ``ca``: the file of the server's CA."""
    return {
        MUTATING: [_asked_about_pods(f"{url}/mutate", ca)],
        VALIDATING: [_asked_about_pods(f"{url}/validate", ca)],
    }


def _asked_about_pods(url: str, ca: Path) -> Json:
    return {
        "name": "pods.bench.vcuda.io",
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}],
        "clientConfig": _client_config(url, ca),
        "failurePolicy": "Fail",
        "sideEffects": "NoneOnDryRun",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 10,
    }


def installed(url: str, ca: Path, registration: Path = REGISTRATION) -> Webhooks:
    """Return vcuda quota's webhooks with their rules and conditions. They are called at ``url``, not at a Service."""
    webhooks: dict[str, list[Json]] = {MUTATING: [], VALIDATING: []}
    for document in yaml.safe_load_all(registration.read_text()):
        for webhook in yaml.safe_load(document["metadata"]["annotations"]["quota.vcuda.io/webhooks"]):
            path = webhook["clientConfig"]["service"]["path"]
            webhooks[document["kind"]].append({**webhook, "clientConfig": _client_config(f"{url}{path}", ca)})
    return webhooks


def _client_config(url: str, ca: Path) -> Json:
    return {"url": url, "caBundle": base64.b64encode(ca.read_bytes()).decode()}


def policies() -> list[Json]:
    """Return vcuda quota's policies and their bindings. The last policy rejects the ConfigMap named `PROBE`, which
    shows that the policies are in effect."""
    return sorted(manifests(*POLICIES), key=lambda each: each["metadata"]["name"] == PROBED)


@contextmanager
def policies_in_effect(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Create vcuda quota's policies, and wait until they apply in this namespace. At the end of the ``with`` block,
    delete them."""
    stored = policies()
    for manifest in stored:
        cluster.create(manifest)
    # The API server reads the policies in the order in which they were created. So when the last policy rejects the
    # probe, all policies are in effect.
    eventually(lambda: PROBED in _rejection(cluster, namespace))
    yield
    for manifest in stored:
        cluster.delete(f"{cluster.path_of(manifest)}/{manifest['metadata']['name']}")
    eventually(lambda: not _rejection(cluster, namespace))


def _rejection(cluster: Cluster, namespace: str) -> str:
    metadata = {"namespace": namespace, "name": PROBE}
    return cluster.try_create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, dryRun="All").message
