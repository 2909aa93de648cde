"""The names and texts by which the parts of this system, and people, recognize quota and ledgers."""

import re

UNSTORED_CAUSE = (
    "another admission plugin probably rejects these pods after the charge, such as a ResourceQuota or a policy: "
    "see the Events FailedCreate, for example with kubectl describe replicaset"
)
"""The likely cause if pods are charged but not stored, and how to find it."""

LEDGER_NAMESPACE, NODE_NAMESPACE = "vcuda-quota-ledgers", "vcuda-quota-node"
"""The default namespaces of the ledgers (records of charges) and of the node agents. Both must contain nothing else."""

# The quota entry `*` (for namespaces without their own entry) never applies to the namespaces of Kubernetes itself. If
# their pods were rejected, the cluster might not start.
SYSTEM_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})

UNASKED_NAMESPACES = frozenset({"kube-system", "vcuda-quota", LEDGER_NAMESPACE, NODE_NAMESPACE})
"""The namespaces for whose pods the API server does not call the webhook, as set in manifests/base. If the webhook
had to admit its own pods, it could not start again after all its pods were deleted."""

STORABLE_SECONDS = 75
"""This many seconds after its admission, a pod can no longer be stored. The API server ends a request after a minute,
and etcd may need a few more seconds."""

MAX_TERMINATING_SECONDS = 600
"""The longest time for which a pod stays charged after a forced deletion, and so the longest grace period of a pod."""

MODELS_ANNOTATION = "quota.vcuda.io/models"
"""The annotation in which a pod lists the models that it may use. Only the webhook's path /mutate reads it. A pod is
charged for the model to which its nodeSelector and node affinity limit it."""

MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The annotation that shows people the model of a pod. Users can edit it, so no decision depends on this annotation."""

MODEL_LABEL, POOL_LABEL = "gaia.tencent.com/gpu-model", "gaia.tencent.com/gpu-pool"
"""The default names of the node labels with the GPU model and the pool."""

USAGE_NAME, USAGE_KEY = "gpu-quota-usage", "usage.json"
"""The ConfigMap in which the controller publishes the usage of a limited namespace, and the key of that ConfigMap."""

USAGE_LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "quota.vcuda.io/usage": "true"}

TOTAL = "total"
"""The key of a quota entry for the limit of all models together. Messages name this limit instead of a model."""

TEAMS = "gpu_teams"
"""The key of the teams in the quota ConfigMap."""

DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""A pattern for a DNS label (RFC 1123). Kubernetes requires the name of a namespace to be a DNS label."""

NAMESPACE_RULE = (
    "the name of a namespace must have at most 63 lower-case letters, digits and `-`, and must begin and end with a "
    "letter or digit"
)


def is_namespace_name(name: object) -> bool:
    return isinstance(name, str) and DNS_LABEL.fullmatch(name) is not None


def team_path(name: str) -> str:
    """Return the path of a team in the quota ConfigMap. No namespace has a name with a dot."""
    return f"{TEAMS}.{name}"
