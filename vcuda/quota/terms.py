"""The names, constants and texts of the quota that `kubectl gpuquota` also needs.

The plugin is shipped without binary packages. So this module imports only the standard library.
"""

import enum
import re

CORES_PER_CARD = 100

OVER_QUOTA = "exceeded GPU quota"
"""How every refusal for want of quota begins."""

MALFORMED = "malformed GPU request"
"""How every refusal of a malformed request begins."""

LEDGER_NAMESPACE, NODE_NAMESPACE = "vcuda-quota-ledgers", "vcuda-quota-node"
"""The default namespaces of the ledgers and of the node agents. They hold nothing else."""

STORABLE_SECONDS = 75
"""Seconds after its admission when a pod can no longer be stored. The API server ends a request after a minute, and
etcd may need some seconds more."""

MODELS_ANNOTATION = "quota.vcuda.io/models"
"""Only /mutate reads it. The charge follows from the pin, which /validate reads from the spec."""

MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The model of a pod, for people. No decision reads it, since the owner of the pod can edit it."""

MODEL_LABEL, POOL_LABEL = "gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool"
"""The default names of the node labels with a node's GPU model and its pool."""

USAGE_NAME, USAGE_KEY = "gpu-quota-usage", "usage.json"
"""The ConfigMap in each limited namespace in which the controller publishes the usage, and its key."""

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
    """Return whether it is a DNS label of RFC 1123, as the name of every namespace is (Kubernetes documentation)."""
    return isinstance(name, str) and _DNS_LABEL.fullmatch(name) is not None


def would_be_pinned(model: str) -> str:
    return f"would be pinned to {model}"


def cards(cores: int) -> str:
    """Render hundredths of a card: 800 is ``8 cards``, 100 ``1 card``, 250 ``2.5 cards``."""
    amount = f"{cores / CORES_PER_CARD:.2f}".rstrip("0").rstrip(".")
    return f"{amount} card" if amount == "1" else f"{amount} cards"


def mebibytes(memory: int) -> str:
    """Render MiB."""
    return f"{memory} MiB"
