"""The webhooks that a measurement registers: two simple webhooks, or our webhooks as the manifests install them.

Our webhooks are registered together with our ValidatingAdmissionPolicies, as in every installation. The API server
evaluates these policies for every request.
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
"""The items of the field `webhooks`, by the kind of the webhook configuration."""


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
    """Return all our webhooks with their rules, selectors and conditions, but called at ``url``, not at the Service."""
    webhooks: dict[str, list[Json]] = {MUTATING: [], VALIDATING: []}
    for document in yaml.safe_load_all(registration.read_text()):
        for webhook in yaml.safe_load(document["metadata"]["annotations"]["quota.vcuda.io/webhooks"]):
            path = webhook["clientConfig"]["service"]["path"]
            webhooks[document["kind"]].append({**webhook, "clientConfig": _client_config(f"{url}{path}", ca)})
    return webhooks


def _client_config(url: str, ca: Path) -> Json:
    return {"url": url, "caBundle": base64.b64encode(ca.read_bytes()).decode()}


def policies() -> list[Json]:
    """Return all our policies and their bindings. The last policy, which rejects a probe, proves their effect."""
    return sorted(manifests(*POLICIES), key=lambda each: each["metadata"]["name"] == PROBED)


@contextmanager
def policies_in_effect(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Keep our policies in effect during the ``with`` statement. Wait until they are in effect in this namespace."""
    stored = policies()
    for manifest in stored:
        cluster.create(manifest)
    # The API server reads the policies in the order in which they were created. So when the last policy rejects the
    # probe, all policies are in effect.
    eventually(lambda: PROBED in _refusal(cluster, namespace))
    yield
    for manifest in stored:
        cluster.delete(f"{cluster.path_of(manifest)}/{manifest['metadata']['name']}")
    eventually(lambda: not _refusal(cluster, namespace))


def _refusal(cluster: Cluster, namespace: str) -> str:
    metadata = {"namespace": namespace, "name": PROBE}
    return cluster.try_create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, dryRun="All").message
