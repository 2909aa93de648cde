"""The webhook's messages about pods that it cannot decide: 429, 500, 503, and 400 if its registration is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from unittest import mock

import msgspec
import structlog

from tools.reference.examples import container, pod, policy_for, review
from tools.reference.pod_answers import CARD, SMALL, Answering, charge
from tools.reference.told import Told
from tools.reviews import mutate
from vcuda.admission_review import (
    API_VERSION,
    KIND,
    PATCH_TOO_LARGE,
    TOO_DEEP,
    AdmissionReview,
    GroupVersionKind,
    ReviewDeadline,
)
from vcuda.errors import BadReview, Dropped, LedgerLost, ListOverdue, UnreadableLedger
from vcuda.k8s_types import ConfigMap, ObjectMeta
from vcuda.kube import NamedLedger
from vcuda.kube.turns import ListTurns
from vcuda.ledger.ledger import MARGIN_SECONDS, MAX_PENDING, RESERVATION_SECONDS, Ledger, Pending
from vcuda.quota.model import Charge
from vcuda.quota.well_known import STORABLE_SECONDS
from webhook.admission import TOO_LARGE, Gate, NotReady, Service
from webhook.ledger import batches, namespace_ledger
from webhook.ledger.charging import TOO_MANY_NAMESPACES, ChargeRequest, Decision, RetryLater
from webhook.ledger.drafts import too_many_members
from webhook.ledger.ledgers import MemoryLedgers
from webhook.metrics import Metrics
from webhook.review.decisions import Creation


class _Full(MemoryLedgers):
    """A test double of the ledgers, with the maximum number of pending charges."""

    async def charge(self, demand: ChargeRequest) -> Decision:
        pending = {str(number): Pending("P100", Charge(1)) for number in range(MAX_PENDING)}
        return batches.decide(Ledger(pending=pending), demand)


def undecided() -> list[Told]:
    again = (
        "You need not do anything, because the API server's client retries after a second. If this lasts, see [a busy"
        " ledger](troubleshooting.md#a-busy-ledger)."
    )
    down = "An operator must act: see [the webhook is down](troubleshooting.md#the-webhook-is-down)."
    later = (
        "The pod's controller retries by itself. If this lasts, see [a busy ledger](troubleshooting.md#a-busy-ledger)."
    )
    busy = [Answering(namespace_ledger.TOO_MANY), Answering(namespace_ledger.UNSURE)]
    unread = (
        "Wait, if the webhook has just started. Otherwise see the webhook's log: the webhook cannot"
        " read the quota ConfigMap or the nodes."
    )
    malformed = "An operator must act: see [the quota is malformed](troubleshooting.md#the-quota-is-malformed)."
    elsewhere = "You need not do anything, because the API server calls another replica."
    behind = "Wait until the webhook has read the last edit of the quota. If this lasts, see the webhook's log."
    stopping = Gate()
    stopping.close()
    return [
        Told(charge(CARD, SMALL, _Full()).message, later),
        *(Told(charge(CARD, SMALL, ledgers).message, again) for ledgers in busy),
        *(Told(charge(CARD, SMALL, Answering(RetryLater(text))).message, then) for text, then in _overdue()),
        Told(
            charge(CARD, SMALL, Answering(TOO_MANY_NAMESPACES)).message,
            ("This message occurs only with `vcuda-webhook serve --standalone`: restart the webhook."),
        ),
        Told(
            str(LedgerLost("team-a", 0, STORABLE_SECONDS + RESERVATION_SECONDS + MARGIN_SECONDS)),
            "Wait: the webhook admits pods again when the lost ledger has been rebuilt, without any"
            " action. See [a lost ledger](troubleshooting.md#a-lost-ledger).",
        ),
        Told(
            str(LedgerLost("vision", 0, STORABLE_SECONDS + RESERVATION_SECONDS + MARGIN_SECONDS, "team")),
            "Wait: etcd was restored from a backup, so the webhook counts what the namespaces of the team use. Pods"
            " within the part of the quota that their namespace already has are admitted.",
        ),
        Told(
            charge(CARD, SMALL, Answering(too_many_members("vision"))).message,
            "Ask your administrator for a team with fewer namespaces. A namespace without GPU pods leaves its place to"
            " another namespace.",
        ),
        Told(
            _unreadable('{"pending": '),
            "An operator must act: see [a damaged ledger](troubleshooting.md#a-damaged-ledger).",
        ),
        Told(
            _unreadable('{"format": 1}'),
            "Continue the update of vcuda quota: replicas of the other release can read the ledger."
            " See [a damaged ledger](troubleshooting.md#a-damaged-ledger).",
        ),
        *(Told(text, elsewhere) for text in (_not_ready(stopping), *_dropped())),
        Told(TOO_DEEP, "Make the values of the object less deep. For a claim, these are usually its `parameters`."),
        Told(
            PATCH_TOO_LARGE,
            "Use fewer `nodeSelectorTerms` in the required node affinity of the pod, and a valid `nodeName` or none.",
        ),
        Told(
            TOO_LARGE,
            "Make the object smaller. For a pod, `kubectl get pod -o json | wc -c` shows about its size.",
        ),
        Told(_not_ready(Gate()), unread),
        Told(_not_ready(Gate(), valid=False), malformed),
        Told("the cluster's devices have not been read yet, so claims cannot be charged", unread),
        Told("the ledger was counted by a newer quota ConfigMap than this replica has read", behind),
        Told('failed calling webhook "validate.quota.vcuda.io": … (the API server\'s own sentence)', down),
    ]


def _dropped() -> Iterator[str]:
    """Yield the messages about AdmissionReviews that a webhook replica drops without a decision."""
    late, abandoned = ReviewDeadline(0), ReviewDeadline()
    abandoned.abandon()
    for deadline in (late, abandoned):
        try:
            deadline.check()
        except Dropped as dropped:
            yield str(dropped)


def _overdue() -> Iterator[tuple[str, str]]:
    """Yield two messages with advice: for a LIST of a namespace that took too long, and for a LIST that did not
    start."""

    def too_large(_seconds: float) -> None:
        raise ListOverdue

    smaller = "Reduce the number or the size of pods and claims in the namespace."
    with mock.patch("vcuda.kube.turns.MAX_QUICK", 0):
        no_turn = ListTurns()
    wait = "You need not do anything, because the pod's controller retries by itself."
    for turns, then in ((ListTurns(), smaller), (no_turn, wait)):
        try:
            turns.run("team-a", too_large, patience=0)
        except ListOverdue as error:
            yield str(error), then


def _service(gate: Gate, *, valid: bool = True) -> Service:
    log = structlog.get_logger()
    return Service(lambda: None, MemoryLedgers(), Metrics(), gate, log, quota_valid=lambda: valid)


def _not_ready(gate: Gate, *, valid: bool = True) -> str:
    body = msgspec.json.encode(AdmissionReview(API_VERSION, KIND, review(pod(container()))))
    try:
        asyncio.run(_service(gate, valid=valid).answer("/validate", body, ReviewDeadline.after(5)))
    except NotReady as error:
        return str(error)
    raise AssertionError("the webhook must not decide about a pod without a quota")


def _bad(body: bytes) -> str:
    """Return the error message about a request body that is not a valid AdmissionReview."""
    try:
        asyncio.run(_service(Gate()).answer("/validate", body, ReviewDeadline.after(5)))
    except BadReview as error:
        return str(error)
    raise AssertionError("the webhook must not answer a body that is not an AdmissionReview")


def _unreadable(text: str) -> str:
    metadata = ObjectMeta(name="gpu-ledger-team-a", namespace="vcuda-quota-ledgers")
    try:
        NamedLedger("team-a", ConfigMap(metadata, {"ledger": text})).read()
    except UnreadableLedger as error:
        return str(error)
    raise AssertionError("the example ledger must not be readable")


def registered() -> list[Told]:
    policy = policy_for(SMALL)
    kind = review(pod(container()), kind=GroupVersionKind("apps", "v1", "Deployment"))
    unread, invented = review("no pod"), review(pod(container()), "Team A")
    rules = "Correct the registration of the webhook: apply the manifests again."
    nobody = "You need not do anything, because no API server sends such a request."
    versions = {"apiVersion": "admission.k8s.io/v2", "kind": "AdmissionReview"}
    return [
        Told(
            asyncio.run(mutate(Creation(kind, policy, MemoryLedgers()))).message,
            rules,
        ),
        Told(charge(CARD, SMALL, metadata={}).message, rules),
        Told(
            asyncio.run(mutate(Creation(invented, policy, MemoryLedgers()))).message,
            nobody,
        ),
        Told(_bad(json.dumps(versions).encode()), rules),
        Told(
            asyncio.run(mutate(Creation(unread, policy, MemoryLedgers()))).message,
            nobody,
        ),
        Told(_bad(b"pod"), nobody),
        Told(_bad(json.dumps({**versions, "apiVersion": "admission.k8s.io/v1"}).encode()), nobody),
    ]
