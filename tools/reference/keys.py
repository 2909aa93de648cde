"""The tables of all annotations and labels that the product sets or reads, for docs/reference.md.

This module describes the project's own keys. The vendors' keys are read from `SCHEMES`, the table of the vendors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tools.reference.markdown import code, listed, table
from tools.reference.sources import ROOT, strings
from vcuda.discovery.sources import CLOUD_LABELS
from vcuda.requests.schemes import SCHEMES, Scheme

_KEY = re.compile(r"[a-z0-9-]+(?:\.[a-z0-9-]+)+/[A-Za-z0-9._-]*")
_NO_KEY = re.compile(r".*/v[0-9]+(?:(?:alpha|beta)[0-9]+)?")


class Told(NamedTuple):
    """The description of an annotation or label."""

    on: str
    by: str
    what: str


OURS = {
    "quota.vcuda.io/enforced": Told(
        "label of a namespace",
        "set and removed by the controller",
        "`false`: the namespace has no limit, and the webhook is not called for its pods. `taking-effect`: the"
        " namespace was limited recently, and the API server may not call the webhook yet. Without the label the"
        " webhook is called. The controller sets the label by the quota document, and reverts manual edits. Only the"
        " controller, and users who may edit webhook configurations, may set `false`.",
    ),
    "quota.vcuda.io/config": Told(
        "label of the quota ConfigMap",
        "set by you, read by the API server",
        "`true`: the webhook's path `/quota` checks edits of the ConfigMap, and rejects malformed edits.",
    ),
    "quota.vcuda.io/model": Told(
        "annotation of a pod",
        "set by the webhook",
        "The model to which the pod is pinned, as information for people. The annotation does not affect decisions.",
    ),
    "quota.vcuda.io/models": Told(
        "annotation of a pod, or of a ResourceClaim",
        "set by you",
        "The GPU models that the pod or claim may use, in the order in which the webhook tries them,"
        " for example `H100, A100`. A final `*` also allows the other models of the quota. Only"
        " `/mutate` reads the annotation, when the object is created.",
    ),
    "quota.vcuda.io/retried-at": Told(
        "annotation of a ReplicaSet, StatefulSet, DaemonSet, ReplicationController, Job, or pod without its claim",
        "set by the controller",
        "The time when the controller last made the workload retry, because quota was released or a node changed.",
    ),
    "quota.vcuda.io/ledger-of": Told(
        "label of a ledger (ConfigMap `gpu-ledger-NAMESPACE`)",
        "set by the webhook and the controller",
        "The namespace of the ledger.",
    ),
    "quota.vcuda.io/team-ledger-of": Told(
        "label of the ledger of a team (ConfigMap `gpu-ledger-team.TEAM`)",
        "set by the webhook and the controller",
        "The team of the ledger.",
    ),
    "team.quota.vcuda.io/": Told(
        "label `team.quota.vcuda.io/TEAM` of a ledger",
        "set by the webhook and the controller",
        "A team in which the namespace of the ledger has an allotment. It is the part of the team's quota that the"
        " namespace may use.",
    ),
    "quota.vcuda.io/ledger": Told(
        "finalizer of a ledger",
        "set by the webhook and the controller, removed by the controller",
        "The finalizer delays the deletion of the ledger while the ledger has charges of pods that are not stored.",
    ),
    "quota.vcuda.io/usage": Told(
        "label of ConfigMap `gpu-quota-usage`",
        "set by the controller, read by `kubectl gpuquota -A`",
        "`true`: the ConfigMap is a usage report. The controller does not change a ConfigMap of this"
        " name without the label, because another program owns it.",
    ),
    "quota.vcuda.io/webhooks": Told(
        "annotation of the webhook configurations of vcuda quota",
        "set by the manifests, read by `vcuda-certs`",
        "The webhooks, as YAML, that `vcuda-certs` registers after a replica of the webhook has answered.",
    ),
    "quota.vcuda.io/runbooks": Told(
        "annotation of the PrometheusRule of vcuda quota",
        "set by the manifests",
        "The address of the documentation page for the `runbook_url` of each alert.",
    ),
    "quota.vcuda.io/ca-trusted-since": Told(
        "annotation of the CA's Secret",
        "set and read by `vcuda-certs rotate`",
        "The time since which every caBundle contains the next CA, and the identity of that CA.",
    ),
    "quota.vcuda.io/ca-served-since": Told(
        "annotation of the CA's Secret",
        "set and read by `vcuda-certs rotate`",
        "The time since which every endpoint of the Service serves a certificate of the current CA,"
        " and the identity of that CA.",
    ),
    "app.kubernetes.io/part-of": Told(
        "label of every object of the manifests",
        "read by `vcuda-certs`",
        "`vcuda-quota`: `vcuda-certs` manages the webhooks and caBundles of a webhook configuration with this label"
        " (`--selector`).",
    ),
    "app.kubernetes.io/managed-by": Told(
        "label of objects that vcuda quota creates",
        "set by the webhook and the controller",
        "`vcuda-quota`.",
    ),
    "quota.vcuda.io/written-by": Told(
        "label of the Secrets and ConfigMaps with certificates",
        "set by the manifests, set and read by `vcuda-certs`",
        "`vcuda-certs`. If a Secret has content but not this label, `vcuda-certs` never overwrites the Secret.",
    ),
    "app.kubernetes.io/component": Told(
        "label of the ConfigMaps `gpu-placements.NODE`",
        "set and read by the extender",
        "`gpu-placements`: the pods to which the extender has allocated cards of the node.",
    ),
    "kubernetes.io/service-name": Told(
        "label of an EndpointSlice",
        "read by `vcuda-certs` and the controller; set by the extender on EndpointSlice `vcuda-extender`",
        "The Service to which the slice belongs. The slices of the webhook's Service list the replicas whose"
        " certificates are checked. The slice of Service `vcuda-extender` routes kube-scheduler to the leader.",
    ),
    "endpointslice.kubernetes.io/managed-by": Told(
        "label of EndpointSlice `vcuda-extender`",
        "set by the extender",
        "`vcuda-quota`, so that Kubernetes' own controllers do not change the slice.",
    ),
    "app.kubernetes.io/name": Told(
        "label of the pods of `vcuda-webhook` and `vcuda-controller`",
        "set by the manifests, read by `kubectl gpuquota doctor`",
        "The name of the Deployment.",
    ),
    "gaia.tencent.com/gpu-model": Told(
        "label of a node",
        "read by all parts; set by you, or by the controller with `--discover`",
        "The GPU model of the node, or one of its products in `gpu_models`. `--model-label` sets another key.",
    ),
    "quota.vcuda.io/discovered-model": Told(
        "annotation of a node",
        "set by the controller with `--discover`",
        "The model that the controller wrote into the model label, and the source of this model, for"
        " example `A100 from hami`. If the model label has another value than this annotation,"
        " somebody else has set the label. So the controller never changes it.",
    ),
    **dict.fromkeys(
        ("nvidia.com/gpu.product", "nvidia.com/gpu.memory"),
        Told(
            "label of a node",
            "set by GPU feature discovery, read by the controller and `kubectl gpuquota nodes`",
            "The product of the node's cards, and the MiB of one card.",
        ),
    ),
    **dict.fromkeys(
        CLOUD_LABELS,
        Told(
            "label of a node",
            "set by the cloud or Karpenter, read by the controller and `kubectl gpuquota nodes`",
            "The product of the node's cards. It counts only if no other source names the product.",
        ),
    ),
    **dict.fromkeys(
        filter(None, CLOUD_LABELS.values()),
        Told(
            "label of a node",
            "set by the cloud or Karpenter, read by the controller and `kubectl gpuquota nodes`",
            "The vendor of the node's cards. Only the products of `nvidia` are read.",
        ),
    ),
    "gaia.tencent.com/gpu-pool": Told(
        "label of a node", "read by all parts", "The pool of the node. `--pool-label` sets another key."
    ),
    "nvidia.com/gpu.count": Told(
        "label of a node",
        "set by GPU feature discovery, read by the webhook, the controller and `kubectl gpuquota nodes`",
        "The number of the node's cards. An edit of the quota that allows more cards than the nodes have gets a"
        " warning.",
    ),
    "kubernetes.io/hostname": Told(
        "label of a node",
        "read by the webhook",
        "If only some nodes of a model have HAMi, the webhook keeps pods that name their own"
        " scheduler off these nodes by their hostnames.",
    ),
    "hami.io/webhook": Told(
        "label of a pod",
        "read by the webhook",
        "`ignore`: HAMi's webhook leaves the pod alone. Such a pod keeps its scheduler if its model"
        " has nodes without HAMi.",
    ),
    "kubernetes.io/config.mirror": Told(
        "annotation of a mirror pod",
        "read by all parts",
        "Marks a mirror pod, by which a kubelet shows a static pod. A mirror pod is admitted without"
        " a charge, because the static pod already runs. This applies only if a kubelet creates the"
        " mirror pod, because any user can write the annotation. A mirror pod over quota is reported,"
        " but not evicted.",
    ),
    "cert-manager.io/": Told(
        "annotations of the serving Secret or of a webhook configuration",
        "read by `vcuda-certs`",
        "An annotation with this prefix means that cert-manager manages the object. So `vcuda-certs` does not"
        " change the"
        " object.",
    ),
    "service.beta.openshift.io/": Told(
        "annotations of the serving Secret or of a webhook configuration",
        "read by `vcuda-certs`",
        "An annotation with this prefix means that OpenShift's service CA manages the object. So `vcuda-certs` does not"
        " change the object.",
    ),
}

WANTED = (
    "read at creation: the pod may use only models whose name or registered card type contains one of"
    " the texts in this annotation; the webhook then replaces the texts by the registered card types"
    " of the chosen model"
)
UNWANTED = (
    "read at creation: the pod may not use models or card types that contain one of the texts in this"
    " annotation; the webhook then adds the card types of other models that contain a wanted type"
)

_NEITHER = {
    "kubernetes.io/tls": "the type of a Secret",
}
"""Texts in the source code that have the form of a key, but belong to no annotation or label of a stored object."""


def in_the_source() -> set[str]:
    """Return every key of an annotation or label in the product's source code, except keys composed at run time."""
    return {
        key
        for _, text in strings()
        for key in re.split("[=,]", text)
        if _KEY.fullmatch(key) and not _NO_KEY.fullmatch(key) and key not in _NEITHER
    }


def in_the_manifests() -> set[str]:
    """Return every key of the domain quota.vcuda.io in the manifests."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "manifests").rglob("*.yaml"))
    return {key for text in texts for key in re.findall(r"quota\.vcuda\.io/[a-z]+(?:-[a-z]+)*", text)}


def of_schemes() -> set[str]:
    """Return the names of the vendors' resources, annotations and labels that are in `SCHEMES`."""
    return {key for scheme in SCHEMES for key, *_ in _rows(scheme)} | {
        name for scheme in SCHEMES for name in scheme.resources
    }


def section() -> str:
    """Return a table of our own keys, and a table for each scheme (one vendor's resources and annotations)."""
    ours = table(("key", "on", "who", "what"), [(code(key), told.on, told.by, told.what) for key, told in OURS.items()])
    schemes = "\n\n".join(_section(scheme) for scheme in SCHEMES)
    return f"### Ours, and those of Kubernetes\n\n{ours}\n\n{schemes}"


def _section(scheme: Scheme) -> str:
    unit = "" if scheme.memory_unit == 1 else f"; {code(scheme.memory)} counts blocks of {scheme.memory_unit} MiB"
    asked = f"A pod requests GPUs of {scheme.display_name} by the resources {listed(scheme.resources)}{unit}."
    rows = [(code(key), on, what) for key, on, what in dict.fromkeys(_rows(scheme))]
    kept = scheme.pod_directory
    directory = f" On each node, directories of pods are in {code(kept.root)}, named {code(kept.name)}." if kept else ""
    keys = table(("key", "on", "what we do with it"), rows)
    return f"### {scheme.name}\n\n{asked}{directory}\n\n{keys}"


def _rows(scheme: Scheme) -> Iterator[tuple[str, str, str]]:
    """Yield each annotation or label key, its kind of object, and its use. A key that ends in ``-`` is a prefix."""
    pod, written = "annotation of a pod", "; set by the extender" if scheme.card_index else ""
    stale = f"removed at creation, and later when it is stale{written}"
    named = (
        (
            scheme.core_limit,
            pod,
            "read; the pod is rejected unless the value is an integer from the requested cores to 100",
        ),
        (scheme.wanted_models, pod, WANTED),
        (scheme.unwanted_models, pod, UNWANTED),
        (scheme.card_mode, pod, f"read; {code(scheme.shared_mode)} is set on shares of a model with cards in MIG mode"),
        *((key, pod, stale) for key in scheme.allocation_annotations),
        *((key, pod, "removed at creation") for key in scheme.creation_annotations),
        *((key, "label of a pod", stale) for key in scheme.allocation_labels),
        (scheme.node_lock, "annotation of a node", "removed when it is stale"),
        (scheme.register, "annotation of a node", "read: the cards of the node, and their types"),
        (scheme.handshake, "annotation of a node", "read: whether the device plugin answers its scheduler"),
    )
    for key, on, what in named:
        if key:
            yield key, on, what
