"""Parses the webhooks that a configuration's annotation declares, and compares them with the registered webhooks.

The manifests contain webhook configurations without webhooks, so that a webhook whose image never starts blocks no pod.
A run of vcuda-certs registers the declared webhooks after a replica has answered, and again if the annotation changes.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from certs import parsing, state

ANNOTATION = "quota.vcuda.io/webhooks"
"""The annotation that declares the webhooks of a webhook configuration, as YAML without caBundles."""

Webhook = dict[str, Any]


class UnusableDeclaration(ValueError):
    """Raised if the annotation of a webhook configuration is not a usable list of webhooks."""


def declared(item: parsing.Json, kind: str, refs: parsing.ObjectRefs) -> state.Declared | None:
    """Return the webhooks that the configuration declares. Raises UnusableDeclaration.

    Each declared webhook gets the caBundle of the registered webhook with the same name. Return None if the webhook
    configuration declares no webhooks, or if a declared webhook calls another Service.
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
    if not there and wanted:
        return "no webhook is registered yet"
    wanted_by_name, by_name = _by_name(wanted), _by_name(there)
    differing = [name for name in {**wanted_by_name, **by_name} if wanted_by_name.get(name) != by_name.get(name)]
    if differing:
        return f"the webhooks differ from annotation {ANNOTATION}: {', '.join(differing)}"
    return "" if list(wanted) == list(there) else f"the webhooks are not in the order of annotation {ANNOTATION}"


def _webhooks(text: object) -> list[Webhook]:
    # Users may have edited the annotation. So the fields that this module uses are checked here. The API server checks
    # all other fields when the webhooks are registered.
    try:
        # The API server receives the webhooks as JSON. json.dumps() raises TypeError, for example for a YAML date.
        found = json.loads(json.dumps(yaml.safe_load(str(text))))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UnusableDeclaration(f"the value is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(found, list) or not found:
        raise UnusableDeclaration("the value must be a list of webhooks")
    for webhook in found:
        if not isinstance(webhook, Mapping) or not isinstance(webhook.get("name"), str):
            raise UnusableDeclaration("each webhook must have a name")
        client = webhook.get("clientConfig")
        if not isinstance(client, dict) or not isinstance(client.get("service"), dict):
            raise UnusableDeclaration(f"webhook {webhook['name']} must name a Service in clientConfig")
    return found


def _by_name(webhooks: Sequence[Webhook]) -> dict[str, Webhook]:
    return {webhook["name"]: webhook for webhook in webhooks}
