"""The tables in docs/reference.md with the values of the metrics' labels, and their meanings."""

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
    "ignored": "not the creation of a pod or claim that requests GPUs; at `/quota`: not the quota ConfigMap",
    "unlimited": "the namespace has no quota",
    "scheduler": "a claim that the scheduler created for the extended resources of a pod; only the pod is charged",
    "claims": "a pod that requests GPUs only by claims; each claim is charged separately",
    "template": "a ResourceClaimTemplate, which is not charged",
    "mirror": "the mirror of a static pod, created by a kubelet; the static pod already runs",
    "pinned": "`/mutate`: pinned to a model",
    "charged": "`/validate`: within the quota, and charged",
    "over-quota-allowed": "`/validate`: over quota, but admitted and charged, because the mode is `warn` or `audit`",
    "unpinned": "admitted although not pinned to one allowed model, because the mode is `warn` or `audit`",
    "over-quota": "rejected with 403: the stored pods and claims, and the terminating charges, leave too little quota",
    "over-quota-reserved": (
        "429: the pod or claim would fit if the webhook replicas had reserved no quota; they now release it"
    ),
    "over-quota-pending": "429: the pod or claim would fit without the pending charges",
    "over-quota-unsettled": "429: the stored objects leave enough quota, but the ledger is not settled yet",
    "over-quota-uncounted": "429: the ledger has too little room, and the stored objects could not be counted in time",
    "not-allowed": "rejected: the namespace's quota has none of the models that the pod or claim may use",
    "not-pinned": "rejected: not pinned to one allowed model, or otherwise different from what `/mutate` returns",
    "malformed": "rejected: the GPU request is malformed",
    "busy": "429 with a retry in a second: the ledger is full or contended, or the outcome of a write is unknown",
    "unreadable-ledger": "rejected: the ledger is damaged",
    "ledger-lost": "429: the ledger is lost, and pods that were charged in it may still be stored",
    "too-large": "rejected with 413: the review of the object exceeds 3 MiB",
    "bad-request": "rejected: the registration of the webhook is wrong",
    "quota-accepted": "`/quota`: the document is valid",
    "quota-refused": "`/quota`: the document is malformed",
    "quota-deleted": "`/quota`: the ConfigMap is deleted",
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
    EvictionOutcome.DELETED: (
        "a PodDisruptionBudget blocked the eviction `--delete-after-evictions` times, so the pod was deleted"
    ),
    EvictionOutcome.GONE: "the pod was deleted before the eviction",
    EvictionOutcome.FAILED: (
        "the eviction was rejected or had no answer; the log has the reason; the eviction is retried"
    ),
}
INCIDENTS = {
    "lists": "complete lists",
    "streamed_lists": "complete lists that the API server streamed",
    "watches": "watches that were started",
    "events": "events",
    "failures": "lists and watches that failed",
    "undecodable": "objects that could not be decoded, and were left out",
    "callback_errors": "events whose handling failed",
}


def in_the_source() -> set[str]:
    """Return every outcome in the product's source: an argument of AdmissionResponse, `refused` or `put_off`."""
    found = set()
    for name, position in (("AdmissionResponse", 0), ("refused", 1), ("put_off", 1)):
        for _, called, call in calls(name):
            if called in _ANSWERS and len(call.args) > position:
                found |= set(_texts(call.args[position]))
    return found


_ANSWERS = (
    "vcuda.admission_review.AdmissionResponse",
    *(f"webhook.review.verdicts.{name}" for name in ("refused", "put_off")),
)


def incidents() -> set[str]:
    """Return the names of the incidents that the watches of our programs count in a metric."""
    return {field.name for field in dataclasses.fields(Counts)}


def section() -> str:
    """Return the text of a section, which has a table for each label."""
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
                "finding", "vcuda_audit_pods and vcuda_audit_claims", {kind: FINDINGS[kind] for kind in ViolationKind}
            ),
            _table(
                "outcome of an eviction",
                "vcuda_audit_evictions_total",
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
    """Yield the possible texts of an expression: one text for a literal, and two texts for a conditional expression."""
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    for choice in choices:
        if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
            yield choice.value
