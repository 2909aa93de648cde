"""Reads the webhooks that a configuration declares in an annotation, and compares them with those that are registered.

The manifests apply configurations without webhooks, so an image that never starts blocks no pod. A run registers the
declared webhooks after a replica has answered. A later apply changes the annotation, and a run then registers again.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from certs import parsing, state

ANNOTATION = "quota.vcuda.io/webhooks"
"""The webhooks of a configuration as YAML, without caBundles."""

Webhook = dict[str, Any]


class UnusableDeclaration(ValueError):
    """The annotation does not hold a list of webhooks."""


def declared(item: parsing.Json, kind: str, refs: parsing.ObjectRefs) -> state.Declared | None:
    """Return the webhooks that the configuration declares. None: it declares none, or webhooks of another Service.

    The caBundles are those of the registered webhooks of the same names. Raises UnusableDeclaration.
    """
    if not declares(item):
        return None
    webhooks = _webhooks(item["metadata"]["annotations"][ANNOTATION])
    present = {webhook["name"]: webhook.get("clientConfig", {}).get("caBundle") for webhook in registered(item)}
    for webhook in webhooks:
        if bundle := present.get(webhook["name"]):
            webhook["clientConfig"]["caBundle"] = bundle
    described = {"metadata": item["metadata"], "webhooks": webhooks}
    configuration, elsewhere = parsing.read_configuration(described, kind, refs)
    return None if elsewhere else state.Declared(tuple(webhooks), configuration.hooks)


def declares(item: parsing.Json) -> bool:
    return ANNOTATION in (item["metadata"].get("annotations") or {})


def registered(item: parsing.Json) -> Sequence[Webhook]:
    return item.get("webhooks") or ()


def with_bundles(webhooks: Sequence[Webhook], bundles: Sequence[state.Certificates]) -> list[Webhook]:
    texts = (base64.b64encode(parsing.write_certificates(bundle)).decode() for bundle in bundles)
    return [
        {**webhook, "clientConfig": {**webhook["clientConfig"], "caBundle": text}}
        for webhook, text in zip(webhooks, texts, strict=True)
    ]


def difference(wanted: Sequence[Webhook], there: Sequence[Webhook]) -> str:
    """Return how the registered webhooks differ from the wanted ones; empty if they are the same."""
    if not there and wanted:
        return "no webhook is registered yet"
    wanted_by_name, by_name = _by_name(wanted), _by_name(there)
    differing = [name for name in {**wanted_by_name, **by_name} if wanted_by_name.get(name) != by_name.get(name)]
    if differing:
        return f"not as its annotation {ANNOTATION} declares: {', '.join(differing)}"
    return "" if list(wanted) == list(there) else f"not in the order of its annotation {ANNOTATION}"


def _webhooks(text: object) -> list[Webhook]:
    # A person may have edited the annotation, so its shape is checked as far as it is read here. The API server checks
    # the rest.
    try:
        # JSON allows none of what YAML adds, such as dates and references.
        found = json.loads(json.dumps(yaml.safe_load(str(text))))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UnusableDeclaration(f"not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(found, list) or not found:
        raise UnusableDeclaration("not a list of webhooks")
    for webhook in found:
        if not isinstance(webhook, Mapping) or not isinstance(webhook.get("name"), str):
            raise UnusableDeclaration("a webhook has no name")
        client = webhook.get("clientConfig")
        if not isinstance(client, dict) or not isinstance(client.get("service"), dict):
            raise UnusableDeclaration(f"webhook {webhook['name']} names no Service in its clientConfig")
    return found


def _by_name(webhooks: Sequence[Webhook]) -> dict[str, Webhook]:
    return {webhook["name"]: webhook for webhook in webhooks}
