"""The tables in docs/reference.md that explain the values of the metrics' labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from controller.garbage.node.names import KeepReason
from controller.violations.violation_watcher import EvictionOutcome
from controller.violations.violations import ViolationKind
from tools.reference.markdown import code, table
from tools.reference.others import removal_rules
from vcuda.admission_review import Outcome
from vcuda.kube import ReflectorCounts
from vcuda.requests.schemes import SCHEMES

OUTCOMES: Mapping[str, str] = {
    Outcome.IGNORED: (
        "the request does not create a pod or claim that requests GPUs; at `/quota`: the object is not the quota"
        " ConfigMap"
    ),
    Outcome.UNLIMITED: "the namespace has no quota",
    Outcome.SCHEDULER: (
        "the scheduler created the claim for the extended resources of a pod, and only the pod is charged"
    ),
    Outcome.CLAIMS: "the pod requests GPUs only by claims, and each claim is charged separately",
    Outcome.TEMPLATE: "the object is a ResourceClaimTemplate, which is not charged",
    Outcome.MIRROR: "the pod is the mirror of a static pod, which already runs, and was created by a kubelet",
    Outcome.PINNED: "`/mutate` pinned the pod or claim to a model",
    Outcome.CHARGED: "`/validate` charged the pod or claim, which is within the quota",
    Outcome.OVER_QUOTA_ALLOWED: (
        "`/validate` admitted and charged the pod or claim, although it is over quota: the mode is `warn` or `audit`"
    ),
    Outcome.UNPINNED: (
        "the pod or claim was admitted, although it is not pinned to one allowed model: the mode is `warn` or `audit`"
    ),
    Outcome.OVER_QUOTA: (
        "the pod or claim was rejected with 403, because the stored pods and claims, and the terminating charges, leave"
        " too little quota"
    ),
    Outcome.OVER_QUOTA_RESERVED: (
        "the pod or claim fits only without the quota that webhook replicas have reserved; the replicas now release"
        " this quota"
    ),
    Outcome.OVER_QUOTA_PENDING: "the pod or claim fits only without the pending charges, which belong to objects"
    " that were admitted and not yet seen stored",
    Outcome.OVER_QUOTA_NOT_RECOUNTED: (
        "the stored objects leave enough quota, but the ledger still has charges of deleted objects"
    ),
    Outcome.OVER_QUOTA_UNCOUNTED: (
        "the pod or claim does not fit the ledger, and the stored objects could not be counted in time"
    ),
    Outcome.NOT_MUTATED: (
        "the answer was 429 with a retry after a second, because the pod lacks the patch of `/mutate`; if pods of a"
        " namespace lack the patch for more than 30 s, they are answered 403 with the outcome `not-pinned`"
    ),
    Outcome.NOT_ALLOWED: (
        "the pod or claim was rejected, because the namespace's quota has none of the models that it may use"
    ),
    Outcome.NOT_PINNED: (
        "the pod or claim was rejected, because it is not pinned to one allowed model, or lacks another change of"
        " `/mutate`"
    ),
    Outcome.MALFORMED: "the pod or claim was rejected, because its GPU request is malformed",
    Outcome.BUSY: (
        "too many admitted objects of the namespace are not seen stored yet (403), or too many charges are written to"
        " the ledger at once, or the outcome of a write is unknown (429)"
    ),
    Outcome.UNREADABLE_LEDGER: "the pod or claim was rejected, because the ledger is damaged",
    Outcome.LEDGER_LOST: (
        "the answer was 403, because the ledger is lost, and pods that were charged in it may still be stored"
    ),
    Outcome.TOO_LARGE: (
        "the object was rejected with 413,"
        " because its review exceeds 3 MiB, or 256 KiB with values that cannot be decoded, or its patch exceeds 8 MiB"
    ),
    Outcome.BAD_REQUEST: "the request was rejected, because the registration of the webhook is wrong",
    Outcome.QUOTA_ACCEPTED: "`/quota` accepted the quota document, which is valid",
    Outcome.PROBED: (
        "`/quota` rejected the ConfigMap by which the controller checks every minute that the webhook is called"
    ),
    Outcome.QUOTA_REJECTED: "`/quota` rejected the quota document, which is malformed",
}
FINDINGS = {
    ViolationKind.UNPINNED: (
        "the pod or claim is not charged, because it is not pinned to a model, and its node or devices have no known"
        " model"
    ),
    ViolationKind.NOT_ALLOWED: (
        "the namespace must not use the model, or a claim requests `All` or `adminAccess`, which is rejected"
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
    "lists": "the LIST requests of watches that succeeded",
    "watches": "the watches that were started",
    "events": "the events that the watches have received",
    "failures": "the LIST and watch requests that failed",
    "undecodable": "the changed objects that could not be decoded; the program still uses their last good state",
    "callback_errors": "the events that the program failed to handle",
}


def incidents() -> set[str]:
    """Return the names of the incidents, such as a lost connection, that a metric counts for the watches of our
    programs."""
    return {field.name for field in dataclasses.fields(ReflectorCounts)}


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
