"""The tables in docs/reference.md that explain the values of the metrics' labels."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping

from controller.garbage.node.names import KeepReason
from controller.violations.violation_watcher import EvictionOutcome
from controller.violations.violations import ViolationKind
from tools.reference.markdown import code, table
from tools.reference.others import removal_rules
from tools.reference.sources import calls
from vcuda.kube import Counts
from vcuda.requests.schemes import SCHEMES

OUTCOMES = {
    "ignored": (
        "the request does not create a pod or claim that requests GPUs; at `/quota`: the object is not the quota"
        " ConfigMap"
    ),
    "unlimited": "the namespace has no quota",
    "scheduler": "the scheduler created the claim for the extended resources of a pod, and only the pod is charged",
    "claims": "the pod requests GPUs only by claims, and each claim is charged separately",
    "template": "the object is a ResourceClaimTemplate, which is not charged",
    "mirror": "the pod is the mirror of a static pod, which already runs, and was created by a kubelet",
    "pinned": "`/mutate` pinned the pod or claim to a model",
    "charged": "`/validate` charged the pod or claim, which is within the quota",
    "over-quota-allowed": (
        "`/validate` admitted and charged the pod or claim, although it is over quota: the mode is `warn` or `audit`"
    ),
    "unpinned": (
        "the pod or claim was admitted, although it is not pinned to one allowed model: the mode is `warn` or `audit`"
    ),
    "over-quota": (
        "the pod or claim was rejected with 403, because the stored pods and claims, and the terminating charges, leave"
        " too little quota"
    ),
    "over-quota-reserved": (
        "the pod or claim fits only without the quota that webhook replicas have reserved; the replicas now release"
        " this quota"
    ),
    "over-quota-pending": "the pod or claim fits only without the pending charges",
    "over-quota-not-recounted": ("the stored objects leave enough quota, but the ledger is not recounted yet"),
    "over-quota-uncounted": ("the ledger has too little room, and the stored objects could not be counted in time"),
    "not-mutated": (
        "the answer was 429 with a retry in a second, because the pod lacks the patch of `/mutate`, and the namespace's"
        " first such pod since a pause of 30 s was less than 30 s ago"
    ),
    "not-allowed": (
        "the pod or claim was rejected, because the namespace's quota has none of the models that it may use"
    ),
    "not-pinned": (
        "the pod or claim was rejected, because it is not pinned to one allowed model, or lacks another change of"
        " `/mutate`"
    ),
    "malformed": "the pod or claim was rejected, because its GPU request is malformed",
    "busy": (
        "the ledger has too many pending charges (403), or is contended, or the outcome of a write is unknown (429)"
    ),
    "unreadable-ledger": "the pod or claim was rejected, because the ledger is damaged",
    "ledger-lost": (
        "the answer was 403, because the ledger is lost, and pods that were charged in it may still be stored"
    ),
    "too-large": (
        "the object was rejected with 413,"
        " because its review exceeds 3 MiB, or 256 KiB with values that cannot be decoded, or its patch exceeds 8 MiB"
    ),
    "bad-request": "the request was rejected, because the registration of the webhook is wrong",
    "quota-accepted": "`/quota` accepted the quota document, which is valid",
    "probed": "`/quota` rejected the ConfigMap by which the controller checks every minute that the webhook is called",
    "quota-rejected": "`/quota` rejected the quota document, which is malformed",
}
FINDINGS = {
    ViolationKind.UNPINNED: (
        "the pod or claim is not charged, because it is not pinned to a model, and its node or devices have no known"
        " model"
    ),
    ViolationKind.NOT_ALLOWED: (
        "the namespace must not use the model, or a claim has a kind of request that is rejected"
    ),
    ViolationKind.OVER_QUOTA: "the pod or claim exceeds the quota together with older pods and claims",
    ViolationKind.OTHER_MODEL: "the pod or claim has a card of another model than it is charged for",
}
EVICTIONS = {
    EvictionOutcome.EVICTED: "the pod terminates",
    EvictionOutcome.BUDGET: "a PodDisruptionBudget does not allow the eviction now; the eviction is retried",
    EvictionOutcome.GONE: "the pod was deleted before the eviction",
    EvictionOutcome.FAILED: (
        "the eviction was rejected or had no answer; the log has the reason; the eviction is retried"
    ),
}
INCIDENTS = {
    "lists": "the lists that ended successfully",
    "watches": "the watches that were started",
    "events": "the events that the watches have received",
    "failures": "the lists and watches that failed",
    "undecodable": "the changes that could not be decoded; each object keeps its last good state",
    "callback_errors": "the events that the program failed to handle",
}


def in_the_source() -> set[str]:
    """Return every outcome that the product's source code passes to AdmissionResponse, ``rejected`` or ``put_off``."""
    found = set()
    for name, position in (("AdmissionResponse", 0), ("rejected", 1), ("put_off", 1)):
        for _, called, call in calls(name):
            if called in _ANSWERS and len(call.args) > position:
                found |= set(_texts(call.args[position]))
    return found


_ANSWERS = (
    "vcuda.admission_review.AdmissionResponse",
    *(f"webhook.review.verdicts.{name}" for name in ("rejected", "put_off")),
)


def incidents() -> set[str]:
    """Return the names of the incidents that the watches of our programs count in a metric."""
    return {field.name for field in dataclasses.fields(Counts)}


def section() -> str:
    reasons = {each.value: f"{each.why}{'' if each.is_expected else '; check it'}" for each in KeepReason}
    schemes = {
        scheme.name: f"`{scheme.cores}` and the related resources; several schemes are separated by commas"
        for scheme in SCHEMES
    }
    schemes["units"] = "a resource without a scheme: a MIG profile, a DeviceClass, a row of `gpu_units`"
    return "\n\n".join(
        [
            _table("outcome", "vcuda_admissions_total, and the webhook's log", OUTCOMES),
            _table("scheme", "vcuda_admissions_total and vcuda_gc_annotations_total", schemes),
            _table(
                "finding",
                "vcuda_violations_pods and vcuda_violations_claims",
                {kind: FINDINGS[kind] for kind in ViolationKind},
            ),
            _table(
                "outcome of an eviction",
                "vcuda_violations_evictions_total",
                {each: EVICTIONS[each] for each in EvictionOutcome},
            ),
            _table("kind", "vcuda_watch_incidents_total", INCIDENTS),
            _table("rule", "vcuda_gc_annotations_total", removal_rules()),
            _table("reason", "vcuda_vm_directories_kept", reasons),
        ]
    )


def _table(label: str, where: str, meanings: Mapping[str, str]) -> str:
    rows = [(code(value), meaning) for value, meaning in meanings.items()]
    return f"### {label}\n\nUsed by {where}.\n\n{table((label, 'what it means'), rows)}"


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the text of a string literal, or both texts of ``a if condition else b``."""
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    for choice in choices:
        if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
            yield choice.value
