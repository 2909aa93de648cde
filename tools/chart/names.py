"""Replaces, in all manifests, the names that an installation may choose: the namespaces, the quota ConfigMap, and the
address of the documentation to which alerts link."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

Json = Any


class Names(NamedTuple):
    """The names that an installation may choose. The defaults are the names in manifests/base."""

    system: str = "vcuda-quota"
    """The namespace of the webhook, the controller and the certificates."""
    ledgers: str = "vcuda-quota-ledgers"
    """The namespace of the ledgers."""
    node_agent: str = "vcuda-quota-node"
    """The namespace of the node agents."""
    quota_namespace: str = "kube-system"
    """The namespace of the quota ConfigMap."""
    quota: str = "gpuquota"
    """The name of the quota ConfigMap."""
    runbooks: str = "docs/troubleshooting.md"
    """The address of the documentation page to which alerts link."""


DEFAULT = Names()

# Matches vcuda-quota only as the name of the namespace, because the image and the webhook configurations have the same
# name. So it matches only next to certain text, for example after ``serviceaccount:`` or before ``.svc``.
_SYSTEM = re.compile(
    r"(?<=serviceaccount:)vcuda-quota(?=:)|(?<=namespace=)vcuda-quota$|(?<=\.)vcuda-quota(?=\.svc|$)"
    r"|(?<= -n )vcuda-quota(?= )|^vcuda-quota(?=/)|(?<=kube-system, )vcuda-quota(?=,)"
    r"""|(?<=amespace: )vcuda-quota(?=[,\s])|(?<=namespace == ")vcuda-quota(?=")|(?<=namespace\(')vcuda-quota(?=')"""
)
_LEDGERS = re.compile(r"vcuda-quota-ledgers")
_NODE_AGENT = re.compile(r"vcuda-quota-node(?![\w-])")
_QUOTA = re.compile(r"""(?<=[="])kube-system/gpuquota(?="|$)""")
_QUOTA_COMMAND = re.compile(r"(?<= -n )kube-system describe configmap gpuquota")
_RUNBOOKS = re.compile(r"^docs/troubleshooting\.md(?=#|$)")

_NAMESPACE_KEYS = {"namespace", "namespaces", "values", "kubernetes.io/metadata.name"}
"""The keys of a manifest whose values may be names of namespaces."""


def rename(found: Json, names: Names) -> Json:
    """Return a copy of a manifest in which ``names`` replace the default names."""
    metadata = found["metadata"]
    renamed = _renamed(found, names, "")
    if found["kind"] == "Namespace":
        renamed["metadata"]["name"] = _of_namespace(metadata["name"], names)
    if metadata.get("namespace") == DEFAULT.quota_namespace and metadata["name"].endswith("-quota"):
        # The Roles and RoleBindings for the quota ConfigMap must be in the namespace of this ConfigMap, which a user
        # can choose. Other objects in kube-system stay in kube-system.
        renamed["metadata"]["namespace"] = names.quota_namespace
    return renamed


def _renamed(value: Json, names: Names, key: str) -> Json:
    match value:
        case dict():
            return {name: _renamed(each, names, name) for name, each in value.items()}
        case [DEFAULT.quota] if key == "resourceNames":
            return [names.quota]
        case list():
            return [_renamed(each, names, key) for each in value]
        case str() if key in _NAMESPACE_KEYS:
            return _of_namespace(value, names)
        case str():
            return _in_text(value, names)
    return value


def _of_namespace(name: str, names: Names) -> str:
    return dict(zip(DEFAULT[:3], names[:3], strict=True)).get(name, name)


def _in_text(text: str, names: Names) -> str:
    for pattern, name in _patterns(names):
        text = pattern.sub(name, text)
    return text


def _patterns(names: Names) -> Iterator[tuple[re.Pattern[str], str]]:
    yield _SYSTEM, names.system
    yield _LEDGERS, names.ledgers
    yield _NODE_AGENT, names.node_agent
    yield _QUOTA, f"{names.quota_namespace}/{names.quota}"
    yield _RUNBOOKS, names.runbooks
    yield _QUOTA_COMMAND, f"{names.quota_namespace} describe configmap {names.quota}"
