"""Register webhooks and know when the API server obeys: some time, up to seconds, after it stored them.

Each configuration gets one more webhook, that nothing serves, for ConfigMaps with a label no one else uses. A
dry-run of such a ConfigMap fails from the moment the configuration is in effect to the moment it is not: a
configuration takes effect whole, so the caller's webhooks do too.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from tests.e2e.rest import Json, Rest

GROUP = "/apis/admissionregistration.k8s.io/v1"
RESOURCES = {
    "MutatingWebhookConfiguration": "mutatingwebhookconfigurations",
    "ValidatingWebhookConfiguration": "validatingwebhookconfigurations",
}
SENTINEL_LABEL = "e2e.vcuda.io/sentinel"
POLL_SECONDS = 0.1


@contextmanager
def registered(rest: Rest, mutating: Sequence[Json], validating: Sequence[Json], timeout: float) -> Iterator[None]:
    """The webhooks in effect; deleted, and without effect, afterwards. TimeoutError where either takes too long.

    Both configurations are stored, or deleted, before either is waited for: their seconds then pass together.
    """
    kinds = {"MutatingWebhookConfiguration": mutating, "ValidatingWebhookConfiguration": validating}
    stored: dict[str, str] = {}
    try:
        for kind, webhooks in kinds.items():
            if webhooks:
                name, path = f"e2e-{secrets.token_hex(4)}", f"{GROUP}/{RESOURCES[kind]}"
                rest.send("POST", path, configuration(kind, name, webhooks)).ok()
                stored[name] = path
        for name in stored:
            await_effect(rest, name, timeout, wanted=True)
        yield
    finally:
        for name, path in stored.items():
            rest.send("DELETE", f"{path}/{name}").ok()
        for name in stored:
            await_effect(rest, name, timeout, wanted=False)


def configuration(kind: str, name: str, webhooks: Sequence[Json]) -> Json:
    """One configuration of ``kind``, and in it what shows whether it is in effect."""
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": name},
        "webhooks": [*webhooks, sentinel(name)],
    }


def sentinel(name: str) -> Json:
    """A webhook that refuses every ConfigMap labelled ``name``: nothing listens on port 1 of 127.0.0.1."""
    return {
        "name": "sentinel.e2e.vcuda.io",
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
        "objectSelector": {"matchLabels": {SENTINEL_LABEL: name}},
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }


def await_effect(rest: Rest, name: str, timeout: float, *, wanted: bool) -> None:
    """Return once configuration ``name`` is, or is no longer, in effect. The API server tells nobody: ask again."""
    deadline = time.monotonic() + timeout
    while in_effect(rest, name) is not wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"webhooks {name}: in effect is not {wanted} {timeout:g} s after the request")
        time.sleep(POLL_SECONDS)


def in_effect(rest: Rest, name: str) -> bool:
    """Whether the sentinel of configuration ``name`` refuses a dry-run."""
    labelled = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {SENTINEL_LABEL: name}}}
    answer = rest.send("POST", "/api/v1/namespaces/default/configmaps", labelled, dryRun="All")
    if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR and "sentinel.e2e.vcuda.io" in answer.message:
        return True
    answer.ok()
    return False
