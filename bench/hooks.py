"""What is registered for a measurement: two webhooks that are anybody's, or ours as the manifests install them."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.e2e.cluster import Json

REGISTRATION = Path(__file__).parents[1] / "manifests/base/registration.yaml"
MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"

Webhooks = Mapping[str, Sequence[Json]]
"""Items of `webhooks`, by the kind of the configuration."""


def simple(url: str, ca: Path) -> Webhooks:
    """One of each kind, at ``url``, asked about every new pod. ``ca``: the file that signs for the server there."""
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
    """All of ours with their rules, selectors and conditions, but for where they are called: at ``url``."""
    webhooks: dict[str, list[Json]] = {MUTATING: [], VALIDATING: []}
    for document in yaml.safe_load_all(registration.read_text()):
        for webhook in document.get("webhooks", ()):
            path = webhook["clientConfig"]["service"]["path"]
            webhooks[document["kind"]].append({**webhook, "clientConfig": _client_config(f"{url}{path}", ca)})
    return webhooks


def _client_config(url: str, ca: Path) -> Json:
    return {"url": url, "caBundle": base64.b64encode(ca.read_bytes()).decode()}
