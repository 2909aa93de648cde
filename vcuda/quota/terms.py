"""The names, constants and texts of the quota that `kubectl gpuquota` also needs.

The plugin is shipped without binary packages. So this module imports only the standard library.
"""

import enum
import re

CORES_PER_CARD = 100

OVER_QUOTA = "exceeded GPU quota"
"""The beginning of every refusal because of too little quota."""

MALFORMED = "malformed GPU request"
"""The beginning of every refusal of a malformed request."""

LEDGER_NAMESPACE, NODE_NAMESPACE = "vcuda-quota-ledgers", "vcuda-quota-node"
"""The default namespaces of the ledgers and of the node agents. They have no other content."""

STORABLE_SECONDS = 75
"""Seconds after its admission from which on a pod can no longer be stored. The API server ends a request after a
minute, and etcd may need some seconds more."""

MODELS_ANNOTATION = "quota.vcuda.io/models"
"""The annotation with the wanted models. Only /mutate reads it. The charge follows from the pin in the spec."""

MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The annotation with the model of a pod, for people. No decision reads it, because the pod's owner can edit it."""

MODEL_LABEL, POOL_LABEL = "gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool"
"""The default names of the node labels with the GPU model and the pool."""

USAGE_NAME, USAGE_KEY = "gpu-quota-usage", "usage.json"
"""The ConfigMap in which the controller publishes the usage of a limited namespace, and its key."""

USAGE_LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "quota.vcuda.io/usage": "true"}


class Mode(enum.StrEnum):
    """The handling of a pod over quota: it is rejected, admitted with a warning, or admitted and only recorded."""

    ENFORCE = "enforce"
    WARN = "warn"
    AUDIT = "audit"


# Kubernetes' own rule for the name of a namespace (a DNS label, RFC 1123).
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")

NO_NAMESPACE = (
    "can never be a namespace; write at most 63 lower-case letters, digits and `-`, with a letter or digit at both ends"
)
"""The message for a name that no namespace can have."""


def is_namespace_name(name: object) -> bool:
    """Return whether ``name`` is a DNS label of RFC 1123, as every name of a namespace is."""
    return isinstance(name, str) and _DNS_LABEL.fullmatch(name) is not None


def would_be_pinned(model: str) -> str:
    return f"would be pinned to {model}"


def cards(cores: int) -> str:
    """Return hundredths of a card as text: 800 is ``8 cards``, 100 ``1 card``, 250 ``2.5 cards``."""
    amount = f"{cores / CORES_PER_CARD:.2f}".rstrip("0").rstrip(".")
    return f"{amount} card" if amount == "1" else f"{amount} cards"


def mebibytes(memory: int) -> str:
    return f"{memory} MiB"
