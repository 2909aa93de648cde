"""The table of Events in docs/reference.md, with a description of each Event."""

from __future__ import annotations

import ast
from typing import NamedTuple

from tools.reference.markdown import code, table
from tools.reference.sources import calls, constant


class Posted(NamedTuple):
    """The reason and type of an Event that the product's source creates."""

    reason: str
    type: str


class Told(NamedTuple):
    """The description of an Event: the kind of object that the Event is about, its cause, and advice for users."""

    on: str
    when: str
    todo: str


TOLD = {
    Posted("BeyondQuota", "Warning"): Told(
        "a pod or a ResourceClaim",
        "The quota would reject the pod or claim if it was created now. Either the older pods and"
        " claims leave no room, or the quota does not list the model, or a claim requests `All` or"
        " `adminAccess`. The pod or claim was created before the quota changed, or while the webhook"
        " was not called. Each object gets one Event. The mode `audit` writes no Events.",
        "Delete the object or raise the limit. With `--evict-violations`, the controller evicts the pod if the quota is"
        " enforced. The controller never deletes a claim: delete the pods that use the claim.",
    ),
    Posted("CertificateNotRenewed", "Warning"): Told(
        "the webhook's Service",
        "An endpoint of the webhook serves a certificate that has less than a third of its lifetime left. The hourly"
        " rotation should have renewed the certificate. One Event is written per day and certificate.",
        "Run `vcuda-certs status`, and then the command that its output names.",
    ),
    Posted("ChargedNotCreated", "Warning"): Told(
        "ConfigMap `gpu-quota-usage`",
        "Pods of the namespace were admitted and charged more than 5 s ago, but no watch has seen them stored. Another"
        " admission plugin probably rejects them after the charge. One Event is written per namespace and hour.",
        "See [Charged pods are not created](troubleshooting.md#charged-pods-are-not-created).",
    ),
    Posted("EvictedOverQuota", "Warning"): Told(
        "a pod",
        "With `--evict-violations`: the pod exceeded the quota for `--violations-period` seconds, and was evicted. The"
        " message has the reason.",
        "Nothing. The quota applies to the pod that the workload creates instead.",
    ),
    Posted("EvictionPutOff", "Warning"): Told(
        "a pod",
        "With `--evict-violations`: a PodDisruptionBudget does not allow the eviction now. The controller retries the"
        " eviction every `--violations-period` seconds. Each pod gets one Event.",
        "Change the PodDisruptionBudget so that it allows a disruption, or raise the limit.",
    ),
    Posted("GrantEnds", "Warning"): Told(
        "a pod or a ResourceClaim",
        "A grant (quota for a limited time) of the namespace ends within a day. After that, the pod"
        " or claim does not fit the limit. The message has the time, and says whether the pod is then"
        " evicted. One Event is written for each end of a grant. The mode `audit` writes no Events.",
        "Finish the work before the grant ends, or ask for a longer grant.",
    ),
    Posted("GPUModelInDoubt", "Warning"): Told(
        "a node",
        "With `--discover`: the GPU model of the node is not certain. Either the sources of the model"
        " disagree, or the node has cards of several models, or a source cannot be read, or the"
        " controller found another model than the label has, or the node offers a GPU and no source"
        " names its model. The message names the model that is used. At most one Event is written"
        " for each problem in five minutes. The Event is repeated every hour while the problem lasts.",
        "See [the messages](#the-event-gpumodelindoubt).",
    ),
    Posted("MalformedQuota", "Warning"): Told(
        "the quota ConfigMap",
        "A malformed quota document was stored. The message lists every fault, and says that the last valid document"
        " stays in force. One Event is written for each version of the ConfigMap.",
        "Correct the quota document. Before you apply it, check it by `vcuda-webhook check --quota FILE POD.yaml`.",
    ),
    Posted("NotCounted", "Warning"): Told(
        "a pod or a ResourceClaim",
        "The pod or claim is not charged to any quota, because its GPU model is unknown. A pod is neither pinned to a"
        " model nor on a node with a model label. This happens if the pod was created before its namespace was limited."
        " A claim is neither pinned to a model nor has a device of a known model. The mode `audit` writes no Events.",
        "Delete the pod or the claim, and create it again.",
    ),
    Posted("OtherModelAllocated", "Warning"): Told(
        "a pod or a ResourceClaim",
        "The pod or claim uses a card of another model than the model that it is charged for. For a pod, this follows"
        " from annotations of the pod and of its node. The charge does not change, because users can write annotations."
        " For a claim, this follows from its status and the ResourceSlices, and the claim is charged for both models."
        " Each object gets one Event. The mode `audit` writes no Events.",
        "Use separate nodes for each type of card, or find out who changed the pod's annotations. Then delete the"
        " pod, and create it again.",
    ),
    Posted("QuotaEdited", "Normal"): Told(
        "the quota ConfigMap",
        "An edit of the quota is in force. The message lists the old and the new values. One Event is written for each"
        " version of the ConfigMap. The log of the webhook names the author.",
        "Check that the new values are the ones that you intended.",
    ),
    Posted("StaleAllocationRemoved", "Normal"): Told(
        "a pod or a node",
        "The controller removed annotations or labels that a vendor's scheduler had left behind. The message names the"
        " scheme, the reason, and each removed key. [Label values](#label-values) lists the rules.",
        "Nothing. If there are very many of these Events, see the logs of the vendor's scheduler and device plugin:"
        " one of them may fail repeatedly.",
    ),
}


def posted() -> set[Posted]:
    """Return the reason and type of every Event that the product's source code creates."""
    found = set()
    for module, called, call in calls("Event"):
        if not called.startswith("vcuda.kube"):
            continue
        fields = dict(zip(("subject", "id", "reason", "message", "component", "type"), call.args, strict=False))
        fields |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        kind = constant(module, fields.get("type", ast.Constant("Normal")))
        found.add(Posted(constant(module, fields["reason"]), kind))
    return found


def section() -> str:
    rows = [
        (code(event.reason), event.type, told.on, told.when, told.todo)
        for event in sorted(posted())
        if (told := TOLD[event])
    ]
    return table(("reason", "type", "on", "when", "what to do"), rows)
