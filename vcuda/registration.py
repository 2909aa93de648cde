"""Finds what is missing of the webhooks and policies that the manifests declare to the API server.

Each webhook configuration declares its webhooks in an annotation. The file policies.json declares the policies.
"""

import base64
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from vcuda import documents, errors

ANNOTATION = "quota.vcuda.io/webhooks"
"""The annotation that declares the webhooks of a webhook configuration, as YAML without caBundles."""

MUTATING, VALIDATING = "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"
POLICY, BINDING = "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
RESOURCES = {
    MUTATING: "mutatingwebhookconfigurations",
    VALIDATING: "validatingwebhookconfigurations",
    POLICY: "validatingadmissionpolicies",
    BINDING: "validatingadmissionpolicybindings",
}
POLICIES = tuple(
    f"{name}.quota.vcuda.io"
    for name in (
        "allocations",
        "certificate-secrets",
        "claims",
        "controller-patches",
        "exempt",
        "forced-deletions",
        "in-effect",
        "ledgers",
        "own-config-maps",
        "quota-config-map",
        "usage",
    )
)
DECLARED = (
    (MUTATING, "00-vcuda-quota"),
    (VALIDATING, "vcuda-quota"),
    *((kind, name) for name in POLICIES for kind in (POLICY, BINDING)),
)
"""The kind and the name of each object that must exist."""

PROBE = "gpu-quota-probe"
"""A ConfigMap that is created by dry runs only. A policy or the webhook rejects it if the API server applies them."""

CALLED = "the API server calls the webhook of vcuda quota for edits of the quota"
"""The reason with which the webhook rejects the probe."""

MAX_NAMED_FAULTS = 3
MAX_REASON_LENGTH = 200

SELECTING = ("namespaceSelector", "objectSelector", "matchConditions")
"""The fields of a webhook that select requests. The API server adds nothing to them, so they must be as declared."""

_DEFAULTS: Mapping[str, object] = {
    "matchPolicy": "Equivalent",
    "namespaceSelector": {},
    "objectSelector": {},
    "scope": "*",
}
"""The fields of a policy that the API server adds."""

_TEXTS = ("message", "reason")
"""The fields of a policy's validations that only decide how a rejection reads."""

_OUR_NAMESPACES: tuple[str, ...] = ("vcuda-quota", "vcuda-quota-ledgers", "vcuda-quota-node")

_OWN_VALUES: Mapping[str, str] = {
    "kube-system/gpuquota": r"[^/\"]{1,63}/[^\"]{1,253}",
    '"gpuquota"': r'"[^"]{1,253}"',
    "gpu_quota": r"[-._a-zA-Z0-9]{1,253}",
    "> 600": r">\ [0-9]{1,9}",
}
"""The parts of the policies that an installation may change, with patterns of their possible values."""

_PEM = re.compile("-----BEGIN CERTIFICATE-----([^-]*)-----END CERTIFICATE-----")

Json = dict[str, Any]


class UnusableDeclaration(ValueError):
    """Raised if the annotation of a webhook configuration is not a usable list of webhooks."""


class MissingObject(NamedTuple):
    """An object that is missing or differs from its declaration. ``reason``: a text that follows the object's name.

    ``unread``: True if the API server refused to return the object. Then it is unknown whether the object is correct.
    """

    kind: str
    name: str
    reason: str
    unread: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.reason}"


def find_missing(get: Callable[[str, str], Json | None]) -> Sequence[MissingObject]:
    """Return the webhooks and policies that are missing or differ from their declarations.

    ``get``: returns an object of the API server by kind and name; None if the object does not exist.
    """
    found, namespaces = [], _OUR_NAMESPACES
    for kind, name in DECLARED:
        try:
            stored = get(kind, name)
        except errors.Forbidden as error:
            found.append(MissingObject(kind, name, f"cannot be read: {error}", unread=True))
            continue
        if kind == VALIDATING and stored:
            namespaces = _named_namespaces(stored)
        reason = "does not exist" if stored is None else _difference(kind, stored, namespaces)
        if reason:
            found.append(MissingObject(kind, name, reason))
    return found


def summarize_missing(missing: Sequence[MissingObject]) -> str:
    """Return one text about all missing objects, which names the first `MAX_NAMED_FAULTS`; empty if none is missing."""
    named = "; ".join(map(str, missing[:MAX_NAMED_FAULTS]))
    return f"{named}; and {len(missing) - MAX_NAMED_FAULTS} more" if len(missing) > MAX_NAMED_FAULTS else named


def read_declaration(text: object) -> list[Json]:
    """Return the webhooks in the value of the annotation. Raises UnusableDeclaration."""
    # Users may have edited the annotation. So the fields that this project uses are checked here. The API server checks
    # all other fields when the webhooks are registered.
    try:
        # The API server receives the webhooks as JSON. json.dumps() raises TypeError, for example for a YAML date.
        values = json.loads(json.dumps(documents.load_all(str(text))))
    except (*documents.NOT_YAML, TypeError) as error:
        reason = str(error).partition("\n")[0][:MAX_REASON_LENGTH]
        raise UnusableDeclaration(f"the value is not YAML: {reason}") from error
    found = values[0] if len(values) == 1 else None
    if not isinstance(found, list) or not found:
        raise UnusableDeclaration("the value must be a list of webhooks")
    for webhook in found:
        if not isinstance(webhook, Mapping) or not isinstance(webhook.get("name"), str):
            raise UnusableDeclaration("each webhook must have a name")
        client = webhook.get("clientConfig")
        if not isinstance(client, dict) or not isinstance(client.get("service"), dict):
            raise UnusableDeclaration(f"webhook {webhook['name']} must name a Service in clientConfig")
    return found


def comparable(value: Any) -> Any:
    """Return a policy's spec, or a part of it, without texts for people and without fields that the API server adds."""
    if isinstance(value, dict):
        kept = {key: comparable(each) for key, each in value.items() if key not in _TEXTS}
        return {key: each for key, each in kept.items() if key not in _DEFAULTS or each != _DEFAULTS[key]}
    return [*map(comparable, value)] if isinstance(value, list) else value


@functools.cache
def _policies() -> Mapping[str, Json]:
    declared: Mapping[str, Json] = json.loads(resources.files(__package__).joinpath("policies.json").read_bytes())
    return declared


def _named_namespaces(configuration: Json) -> tuple[str, ...]:
    """Return the names that this installation's webhook declaration has for the namespaces in `_OUR_NAMESPACES`."""
    text = (configuration["metadata"].get("annotations") or {}).get(ANNOTATION, "")
    found = re.search(r"values:\s*\[?\s*(?:-\s*)?kube-system((?:[,\s-]+[a-z0-9][-a-z0-9]{0,62}){3})", text)
    return tuple(re.findall(r"[a-z0-9][-a-z0-9]*", found[1])) if found else _OUR_NAMESPACES


def _changed_fields(name: str, spec: Json, namespaces: Sequence[str]) -> str:
    """Return the names of the fields in which a stored policy differs from the manifests; empty if there are none."""
    declared, stored = _policies()[name], comparable(spec)
    return ", ".join(
        key
        for key in sorted({*declared, *stored})
        if not re.fullmatch(_pattern(declared.get(key), namespaces), json.dumps(stored.get(key), sort_keys=True))
    )


def _pattern(declared: object, namespaces: Sequence[str]) -> str:
    """Return a regular expression for the JSON of a declared field.

    ``namespaces``: the names that this installation has for `_OUR_NAMESPACES`, in the same order.
    """
    text = re.escape(json.dumps(declared, sort_keys=True))
    for default, own in zip(_OUR_NAMESPACES, namespaces, strict=True):
        # A default name of a namespace may also be the name of another object. So default names are always accepted
        # too.
        word, either = re.escape(re.escape(default)), f"(?:{re.escape(own)}|{re.escape(default)})"
        text = re.sub(rf"(?<![\w-]){word}(?![\w-]|\\-)", either.replace("\\", r"\\"), text)
    for value, allowed in _OWN_VALUES.items():
        text = text.replace(re.escape(value), allowed)
    return text


def _difference(kind: str, stored: Json, namespaces: Sequence[str]) -> str:
    if kind == BINDING:
        # A binding with another action, or with a selector of requests, does not enforce its policy.
        wanted = {"policyName": stored["metadata"]["name"], "validationActions": ["Deny"]}
        return "" if stored["spec"] == wanted else "does not bind its policy with the action Deny for all requests"
    if kind == POLICY:
        changed = _changed_fields(stored["metadata"]["name"], stored["spec"], namespaces)
        return changed and f"differs from the manifests in {changed}"
    return _unlike_declared(stored)


def _unlike_declared(stored: Json) -> str:
    text = (stored["metadata"].get("annotations") or {}).get(ANNOTATION)
    if text is None:
        return f"lacks the annotation {ANNOTATION}"
    try:
        declared = read_declaration(text)
    except UnusableDeclaration as error:
        return f"has an unusable annotation {ANNOTATION}: {error}"
    registered = {webhook["name"]: webhook for webhook in stored.get("webhooks") or ()}
    if not registered:
        return "has no webhooks yet, because no replica of the webhook has answered, or because they were removed"
    if lost := [*_unlike(declared, registered)]:
        return f"lacks or changes the webhooks {', '.join(lost)}"
    # `vcuda-certs rotate` writes its CA into every caBundle, and keeps other CAs that a caBundle has.
    bundles = (registered[webhook["name"]]["clientConfig"]["caBundle"] for webhook in declared)
    trusted = frozenset.intersection(*map(_certificates_of, bundles))
    return "" if trusted else "has webhooks whose caBundles have no common CA"


def _certificates_of(bundle: str) -> frozenset[str]:
    found = _PEM.findall(base64.b64decode(bundle).decode(errors="replace"))
    return frozenset("".join(each.split()) for each in found) or frozenset({bundle})


def _unlike(declared: Sequence[Json], registered: Mapping[str, Json]) -> Iterator[str]:
    """Yield the name of each webhook that is missing or differs, for example ``name (failurePolicy)``."""
    for webhook in declared:
        name = webhook["name"]
        if stored := registered.get(name):
            rest = {key: value for key, value in webhook.items() if key not in SELECTING}
            changed = [key for key, value in rest.items() if not _has(stored.get(key), value)]
            changed += [key for key in SELECTING if (stored.get(key) or None) != (webhook.get(key) or None)]
            changed += [] if stored["clientConfig"].get("caBundle") else ["caBundle"]
            if not changed:
                continue
            name = f"{name} ({', '.join(changed)})"
        yield name


def _has(value: object, wanted: object) -> bool:
    """Return True if ``value`` has everything in ``wanted``. The API server adds fields with default values."""
    if isinstance(wanted, Mapping):
        return isinstance(value, Mapping) and all(_has(value.get(key), each) for key, each in wanted.items())
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) == len(wanted) and all(map(_has, value, wanted))
    return value == wanted
