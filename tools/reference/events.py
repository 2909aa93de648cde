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
        "The quota would reject the pod or claim today: it does not fit beside the older pods and claims, the quota"
        " does not list its model, or a claim requests `All` or `adminAccess`. It was created before the quota changed,"
        " or while the webhook was not called. Once for each; not if the quota only audits.",
        "Delete it or raise the limit. With `--enforce-audit` a pod is evicted if its quota is enforced. A claim is"
        " never deleted: delete the pods that use it.",
    ),
    Posted("CertificateNotRenewed", "Warning"): Told(
        "the webhook's Service",
        "The certificate that an endpoint of the webhook shows has less than a third of its life left, and the hourly"
        " rotation, which should have renewed it, has had its chance. One Event a day and certificate.",
        "`vcuda-certs status`, and the command that the message names.",
    ),
    Posted("DeletedOverQuota", "Warning"): Told(
        "a pod",
        "With `--delete-after-evictions N`: PodDisruptionBudgets have not allowed its eviction for N tries, and it has"
        " been deleted.",
        "Nothing. What its owner creates in its place is held to the quota.",
    ),
    Posted("EvictedOverQuota", "Warning"): Told(
        "a pod",
        "With `--enforce-audit`: it was beyond its quota for `--audit-period` seconds, as the message says, and has"
        " been evicted.",
        "Nothing. What its owner creates in its place is held to the quota.",
    ),
    Posted("EvictionPutOff", "Warning"): Told(
        "a pod",
        "With `--enforce-audit`: a PodDisruptionBudget does not allow its eviction now; it is tried again every"
        " `--audit-period` seconds. Once for each pod.",
        "Let the budget allow a disruption, or raise the limit.",
    ),
    Posted("GrantEnds", "Warning"): Told(
        "a pod or a ResourceClaim",
        "A grant of the namespace's quota ends within a day, and the pod or claim does not fit the limit after that."
        " The message says when, and whether the pod is evicted then. Once for each end; not where the quota only"
        " audits.",
        "Finish the work by then, or ask for a longer grant.",
    ),
    Posted("GPUModelInDoubt", "Warning"): Told(
        "a node",
        "With `--discover`: the sources of the node's GPU model disagree, the node has cards of several models, a"
        " source cannot be read, or another model was found and is not written. The message says which model counts."
        " At most one Event for each doubt in five minutes; an Event of a doubt that lasts is renewed every hour.",
        "The [messages](#the-event-gpumodelindoubt) say what to do.",
    ),
    Posted("MalformedQuota", "Warning"): Told(
        "the quota ConfigMap",
        "A document that is malformed got in. The message names every fault and says that the last good one stays in"
        " force. One Event for each version, from whichever replica or controller is first.",
        "Correct the document; `vcuda-webhook check --quota FILE POD.yaml` tries it beforehand.",
    ),
    Posted("NotCounted", "Warning"): Told(
        "a pod or a ResourceClaim",
        "A vcuda pod in a limited namespace is held to no model and runs on no node that has one, so no quota counts"
        " it: it was created before the namespace was limited. Or a claim that is held to none, and has no device of"
        " one that is known. Not where the quota only audits.",
        "Create the pod or the claim anew.",
    ),
    Posted("OtherModelAllocated", "Warning"): Told(
        "a pod or a ResourceClaim",
        "Its device plugin gave it a card of another model than it is charged to, by the pod's annotations and what the"
        " node registers. The charge stays: annotations prove nothing. Or the scheduler gave a claim such a device, by"
        " the claim's status and the ResourceSlices: then it counts for both models. Once for each; not where the quota"
        " only audits.",
        "Give each type of card nodes of its own, or see who changed the pod's annotations; then create the pod anew.",
    ),
    Posted("QuotaEdited", "Normal"): Told(
        "the quota ConfigMap",
        "An edit of the quota is in force. The message names the changed values, before and after. One Event for each"
        " version, from whichever replica or controller is first. The log of the webhook names the author.",
        "Nothing, if the values are those that you meant.",
    ),
    Posted("StaleAllocationRemoved", "Normal"): Told(
        "a pod or a node",
        "Annotations or labels that a vendor's scheduler had left behind were removed. The message names the scheme,"
        " why, and each of them; the rules are under [label values](#label-values).",
        "Nothing. Very many of them mean that a scheduler or a device plugin does not come to its end: see its log.",
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
