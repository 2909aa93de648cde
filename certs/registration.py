"""Parses the webhooks that a configuration's annotation declares, and compares them with the registered webhooks.

The manifests contain webhook configurations without webhooks, so that a webhook whose image never starts blocks no pod.
A run of vcuda-certs registers the declared webhooks after a replica has answered, and again if the annotation changes.
"""

import base64
from collections.abc import Sequence
from typing import Any

from certs import parsing, state
from vcuda.registration import ANNOTATION, read_declaration

Webhook = dict[str, Any]


def declared(item: parsing.Json, kind: str, refs: parsing.ObjectRefs) -> state.Declared | None:
    """Return the webhooks that the configuration declares. Raises UnusableDeclaration.

    Each declared webhook gets the caBundle of the registered webhook with the same name. Return None if the webhook
    configuration declares no webhooks, or if a declared webhook calls another Service.
    """
    if not declares(item):
        return None
    webhooks = read_declaration(item["metadata"]["annotations"][ANNOTATION])
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


def _by_name(webhooks: Sequence[Webhook]) -> dict[str, Webhook]:
    return {webhook["name"]: webhook for webhook in webhooks}
