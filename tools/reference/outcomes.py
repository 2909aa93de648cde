"""The values of the metrics' labels, as the source has them, with their meaning."""

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
    "ignored": "neither a pod nor a claim that asks for GPUs, or no creation; at `/quota` another ConfigMap",
    "unlimited": "the namespace has no quota",
    "scheduler": "the scheduler's own claim for a pod's extended resources: that pod is charged",
    "claims": "a pod whose GPUs are all claimed: each of its claims is charged by itself",
    "template": "a ResourceClaimTemplate: nothing is charged for it",
    "mirror": "a static pod, shown by its kubelet: it runs already",
    "pinned": "`/mutate`: held to a model",
    "charged": "`/validate`: within the quota, and charged",
    "over-quota-allowed": "`/validate`: charged over a quota that does not enforce",
    "unpinned": "held to no one model that is allowed, and let pass by a quota that does not enforce",
    "over-quota": "refused by 403: stored pods and claims, and what is terminating, leave too little free",
    "over-quota-reserved": "put off by 429: it would fit but for what webhook replicas reserve, and give back now",
    "over-quota-pending": "put off by 429: it would fit but for what is pending",
    "over-quota-unsettled": "put off by 429: what is stored leaves room, and the ledger is not settled yet",
    "over-quota-uncounted": "put off by 429: too little is free, and what is stored could not be counted in time",
    "not-allowed": "refused: none of the models that the pod or claim may use is the namespace's",
    "not-pinned": "refused: not held to one model that is allowed, or otherwise not as `/mutate` leaves it",
    "malformed": "refused: the request means nothing",
    "busy": "put off by a second: the ledger is full, contended, or it is not known whether a write landed",
    "unreadable-ledger": "refused: the ledger is damaged",
    "ledger-lost": "put off by 429: the ledger is gone, and what was charged in it may still be stored",
    "too-large": "refused by 413: the review of the object is over 3 MiB",
    "bad-request": "refused: the webhook is registered wrongly",
    "quota-accepted": "`/quota`: the document is good",
    "quota-refused": "`/quota`: it is malformed",
    "quota-deleted": "`/quota`: the ConfigMap goes",
}
FINDINGS = {
    ViolationKind.UNPINNED: "held to no model and on no node (a claim: given no device) of one, so no quota counts it",
    ViolationKind.NOT_ALLOWED: "on a model that is not the namespace's; or a claim asks in a way that is refused",
    ViolationKind.OVER_QUOTA: "does not fit beside the older pods and claims that do",
    ViolationKind.OTHER_MODEL: "given a card of another model than it is charged to",
}
EVICTIONS = {
    EvictionOutcome.EVICTED: "the pod terminates",
    EvictionOutcome.BUDGET: "a PodDisruptionBudget does not allow it now; it is tried again",
    EvictionOutcome.DELETED: "a PodDisruptionBudget did not allow it for `--delete-after-evictions` tries: deleted",
    EvictionOutcome.GONE: "the pod has gone meanwhile",
    EvictionOutcome.FAILED: "refused, or no answer; the log says why, and it is tried again",
}
INCIDENTS = {
    "lists": "complete lists",
    "streamed_lists": "those of them that the API server streamed",
    "watches": "watches begun",
    "events": "events",
    "failures": "lists and watches that failed",
    "undecodable": "objects that could not be read, and were left out",
    "callback_errors": "events that could not be acted on",
}


def in_the_source() -> set[str]:
    """Return every outcome in the source: an argument of AdmissionResponse, of refused, or of put_off."""
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
    """Return the incidents that a watch counts."""
    return {field.name for field in dataclasses.fields(Counts)}


def section() -> str:
    """Return a table for each label."""
    reasons = {each.value: f"{each.why}{'' if each.is_expected else '; look at it'}" for each in KeepReason}
    schemes = {scheme.name: f"`{scheme.cores}` and the like; several stand with commas" for scheme in SCHEMES}
    schemes["units"] = "a resource of no scheme: a MIG profile, a DeviceClass, a row of `gpu_units`"
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
    return f"### {label}\n\nOf {where}.\n\n{table((label, 'what it means'), rows)}"


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be: one, or either of two."""
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    for choice in choices:
        if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
            yield choice.value
