"""The table of Events: reason and type come from the source, the rest is written here."""

from __future__ import annotations

import ast
from typing import NamedTuple

from tools.reference.markdown import code, table
from tools.reference.sources import calls, constant


class Posted(NamedTuple):
    """An Event as the source writes it."""

    reason: str
    type: str


class Told(NamedTuple):
    """The object of an Event, when it is written, and what to do."""

    on: str
    when: str
    todo: str


TOLD = {
    Posted("BeyondQuota", "Warning"): Told(
        "a pod or a ResourceClaim",
        "The quota would reject the pod or claim today: it does not fit together with the older pods and claims,"
        " the quota does not list its model, or a claim requests `All` or `adminAccess`. It was created before the"
        " quota changed, or while the webhook was not called. One Event for each object; none if the quota only"
        " audits.",
        "Delete it or raise the limit. With `--enforce-audit` a pod is evicted if its quota is enforced. A claim is"
        " never deleted: delete the pods that use it.",
    ),
    Posted("CertificateNotRenewed", "Warning"): Told(
        "the webhook's Service",
        "The certificate that an endpoint of the webhook presents has less than a third of its life left. The"
        " hourly rotation should have renewed it. One Event per day and certificate.",
        "Run `vcuda-certs status`, and the command that the message names.",
    ),
    Posted("DeletedOverQuota", "Warning"): Told(
        "a pod",
        "With `--delete-after-evictions N`: PodDisruptionBudgets have not allowed its eviction at N attempts, so it"
        " was deleted.",
        "Nothing. The quota applies to the pod that its owner creates instead.",
    ),
    Posted("EvictedOverQuota", "Warning"): Told(
        "a pod",
        "With `--enforce-audit`: the pod was beyond its quota for `--audit-period` seconds, and was evicted. The"
        " message has the reason.",
        "Nothing. The quota applies to the pod that its owner creates instead.",
    ),
    Posted("EvictionPutOff", "Warning"): Told(
        "a pod",
        "With `--enforce-audit`: a PodDisruptionBudget does not allow the eviction now. It is retried every"
        " `--audit-period` seconds. One Event for each pod.",
        "Change the budget so that it allows a disruption, or raise the limit.",
    ),
    Posted("GrantEnds", "Warning"): Told(
        "a pod or a ResourceClaim",
        "A grant of the namespace's quota ends within a day, and the pod or claim does not fit the limit after"
        " that. The message says when, and whether the pod is evicted then. One Event for each end; none if the"
        " quota only audits.",
        "Finish the work by then, or ask for a longer grant.",
    ),
    Posted("GPUModelInDoubt", "Warning"): Told(
        "a node",
        "With `--discover`: the sources of the node's GPU model disagree, the node has cards of several models, a"
        " source cannot be read, or another model was found and is not written. The message names the model that is"
        " used. At most one Event for each doubt in five minutes. The Event of a lasting doubt is renewed every"
        " hour.",
        "The [messages](#the-event-gpumodelindoubt) say what to do.",
    ),
    Posted("MalformedQuota", "Warning"): Told(
        "the quota ConfigMap",
        "A malformed document was stored. The message has every fault, and says that the last valid document stays"
        " in force. One Event for each version, by the first replica or controller that reads it.",
        "Correct the document. `vcuda-webhook check --quota FILE POD.yaml` checks it before you apply it.",
    ),
    Posted("NotCounted", "Warning"): Told(
        "a pod or a ResourceClaim",
        "No quota counts the object. A vcuda pod in a limited namespace is pinned to no model and runs on no node"
        " with a model, because it was created before the namespace was limited. Or a claim is pinned to no model"
        " and has no device of a known model. No Event if the quota only audits.",
        "Delete the pod or the claim, and create it again.",
    ),
    Posted("OtherModelAllocated", "Warning"): Told(
        "a pod or a ResourceClaim",
        "The pod has a card of another model than it is charged for, by its annotations and the register of its"
        " node. The charge stays, because annotations prove nothing. Or a claim has such a device, by its status"
        " and the ResourceSlices. Such a claim is charged for both models. One Event for each object; none if the"
        " quota only audits.",
        "Use separate nodes for each type of card, or find out who changed the pod's annotations. Then delete the"
        " pod, and create it again.",
    ),
    Posted("QuotaEdited", "Normal"): Told(
        "the quota ConfigMap",
        "An edit of the quota is in force. The message names the changed values, before and after. One Event for"
        " each version, by the first replica or controller that reads it. The log of the webhook names the author.",
        "Check that these are the values that you intended.",
    ),
    Posted("StaleAllocationRemoved", "Normal"): Told(
        "a pod or a node",
        "Annotations or labels that a vendor's scheduler had left behind were removed. The message names the"
        " scheme, the reason, and each removed key. The rules are under [label values](#label-values).",
        "Nothing. If there are very many of these Events, a scheduler or a device plugin fails to finish its work:"
        " see its log.",
    ),
}


def posted() -> set[Posted]:
    """Return every kind of Event in the source: the calls of the class that `vcuda.kube.post_event` takes."""
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
    """Return the table of the Events."""
    rows = [
        (code(event.reason), event.type, told.on, told.when, told.todo)
        for event in sorted(posted())
        if (told := TOLD[event])
    ]
    return table(("reason", "type", "on", "when", "what to do"), rows)
