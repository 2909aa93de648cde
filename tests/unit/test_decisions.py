"""Tests of the webhook's answers as HTTP responses: for each path, each fault of a pod and each mode of the quota."""

import asyncio
import base64
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
import pytest
import structlog
from structlog.testing import CapturingLogger

from tests.builders import LABELS, Manifest, container, held_to, pod, pod_of_cores, policy_for, review, vcuda_pod
from vcuda.admission_review import API_VERSION, KIND, GroupVersionKind, ReviewDeadline, UserInfo
from vcuda.errors import (
    MAX_FAULT_LENGTH,
    MAX_FAULTS,
    MAX_TEXT_LENGTH,
    MAX_VALUE_LENGTH,
    BadReview,
    LedgerLost,
    Unavailable,
    UnreadableLedger,
    VcudaError,
)
from vcuda.placement.nodes import Nodes
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Quota, Usage
from vcuda.quota.rejections import UNPATCHED
from vcuda.quota.well_known import MODELS_ANNOTATION
from webhook.admission import Gate, NotReady, Service
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.ledgers import MemoryLedgers
from webhook.ledger.namespace_ledger import TOO_MANY, UNSURE
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot
from webhook.server.app import make_pages

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0)}, pools=("public",))
HELD = held_to("M40", "public")
MUTATE, VALIDATE = ("/mutate",), ("/validate",)
BOTH = (*MUTATE, *VALIDATE)


class Ledgers(MemoryLedgers):
    """Ledgers of a namespace that already uses four M40. If ``fault`` is given, each call returns or raises it."""

    def __init__(self, fault: Decision | VcudaError | None = None) -> None:
        super().__init__()
        self._fault = fault

    async def charge(self, request: ChargeRequest) -> Decision:
        if isinstance(self._fault, VcudaError):
            raise self._fault
        if self._fault:
            return self._fault
        await super().charge(ChargeRequest("team-a", "before", "M40", Charge(400), request.quota, 0))
        return await super().charge(request)

    async def usage(self, namespace: str, *_: object) -> Mapping[str, Usage]:
        if isinstance(self._fault, VcudaError):
            raise self._fault
        assert namespace == "team-a"
        return {"M40": Usage(Charge(400), Charge(400))}

    async def cached_usage(self, namespace: str, *_: object) -> Mapping[str, Usage]:
        return await self.usage(namespace)


class Rejection(NamedTuple):
    """The expected answer of the webhook if the quota is enforced."""

    outcome: str
    code: HTTPStatus
    message: str


class Case(NamedTuple):
    """A pod, and the expected answers of the webhook.

    ``lenient``: the outcome and the warning if the mode of the quota is not enforce; empty if every mode rejects the
    pod. Only mode warn returns the warning. ``passes``: the outcome if every mode admits the pod unchanged.
    """

    name: str
    paths: tuple[str, ...]
    manifest: object
    enforced: Rejection | None = None
    lenient: tuple[str, str] = ("", "")
    passes: str = ""
    fields: Mapping[str, Any] = {}
    fault: Decision | VcudaError | None = None


FORBIDDEN, UNPROCESSABLE, BAD_REQUEST = HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.BAD_REQUEST

MALFORMED = "malformed GPU request: spec.containers[0].resources.limits[nvidia.com/vcuda-core]: 150 is more than one"
SHORT = "exceeded quota: M40 in namespace team-a, requested: 5 cards, used: 4 (4 pending), limited: 8, 1 more"
NEVER = (
    "larger than the GPU quota: P100 in namespace team-a, requested: 1 card, used: 0 (0 pending), limited: 0, can never"
)
NO_MODEL = "this pod may use no GPU model in namespace team-a"
_RESTRICT = f"{UNPATCHED}: a required node affinity or nodeSelector must restrict the pod to"
NOT_HELD = f"{_RESTRICT} one GPU model of namespace team-a (M40: 8 cards), but the pod allows these models: "
NOT_IN_POOL = f"{_RESTRICT} the pools of namespace team-a: public"
UNREAD = "the pod cannot be read: "
NO_UID = "the pod has no uid yet; register this path as a validating webhook"
NO_PODS = "this webhook reviews pods, not apps/v1/Deployment"
DAMAGED = "ledger x cannot be read"

SOME = pod_of_cores(100, affinity=HELD)
MANY = pod_of_cores(500, affinity=HELD)
BLOCKED = pod_of_cores(100, affinity=held_to("P100", "public"))
FLOATING, ELSEWHERE = pod_of_cores(100, affinity=None), pod_of_cores(100, affinity=held_to("M40", "private"))
WANTS_A100 = vcuda_pod({"nvidia.com/gpu": 1}, annotations={"nvidia.com/use-gputype": "A100"})
STATIC = pod_of_cores(900, annotations={"kubernetes.io/config.mirror": "x"})
NODE = {"user_info": UserInfo("system:node:a", ("system:nodes",))}
DEPLOYMENT = {"kind": GroupVersionKind("apps", "v1", "Deployment")}

OVER, BLOCKS = Rejection("over-quota", FORBIDDEN, SHORT), Rejection("over-quota", FORBIDDEN, NEVER)
WRONG = Rejection("malformed", UNPROCESSABLE, MALFORMED)
NO_PIN = Rejection("not-mutated", HTTPStatus.TOO_MANY_REQUESTS, NOT_HELD)
NO_POOL = Rejection("not-mutated", HTTPStatus.TOO_MANY_REQUESTS, NOT_IN_POOL)
BUSY = Rejection("busy", HTTPStatus.TOO_MANY_REQUESTS, f"{TOO_MANY.reason}; try again in 1 s")
MAYBE = Rejection("busy", HTTPStatus.TOO_MANY_REQUESTS, f"{UNSURE.reason}; try again in 1 s")
LOST = Rejection("ledger-lost", FORBIDDEN, f"exceeded quota: {LedgerLost('team-a', 5, 70)}")
UNREADABLE = Rejection("unreadable-ledger", HTTPStatus.INTERNAL_SERVER_ERROR, DAMAGED)

CASES = [
    # Cases in which a quota of mode enforce rejects the pod. The other modes admit the pod with a warning.
    Case("malformed", BOTH, pod_of_cores(150, affinity=HELD), WRONG, ("", MALFORMED)),
    Case("no pod", BOTH, [], Rejection("malformed", BAD_REQUEST, UNREAD), ("malformed", UNREAD)),
    Case("over quota", MUTATE, MANY, OVER, ("pinned", "")),
    Case("over quota", VALIDATE, MANY, OVER, ("over-quota-allowed", SHORT)),
    Case("a blocked model", MUTATE, BLOCKED, BLOCKS, ("pinned", "")),
    Case("a blocked model", VALIDATE, BLOCKED, BLOCKS, ("over-quota-allowed", NEVER)),
    Case("no model", MUTATE, WANTS_A100, Rejection("not-allowed", FORBIDDEN, NO_MODEL), ("unpinned", "")),
    Case("not pinned to a model", VALIDATE, FLOATING, NO_PIN, ("unpinned", NOT_HELD)),
    Case("not restricted to the pools", VALIDATE, ELSEWHERE, NO_POOL, ("charged", NOT_IN_POOL)),
    # Cases in which a quota of any mode rejects the pod
    Case("no uid", VALIDATE, vcuda_pod(metadata={}, affinity=HELD), Rejection("bad-request", BAD_REQUEST, NO_UID)),
    Case("another kind", BOTH, SOME, Rejection("bad-request", BAD_REQUEST, NO_PODS), fields=DEPLOYMENT),
    Case("too many charges", VALIDATE, SOME, BUSY, fault=TOO_MANY),
    Case("an unsure write", VALIDATE, SOME, MAYBE, fault=UNSURE),
    Case("a damaged ledger", BOTH, SOME, UNREADABLE, fault=UnreadableLedger(DAMAGED)),
    Case("a ledger that was lost just now", BOTH, SOME, LOST, fault=LedgerLost("team-a", 5, 70)),
    # Cases in which a quota of any mode admits the pod unchanged
    Case("no cards", BOTH, pod(container()), passes="ignored"),
    Case("an update", BOTH, pod_of_cores(150), passes="ignored", fields={"operation": "UPDATE"}),
    Case("a subresource", BOTH, pod_of_cores(150), passes="ignored", fields={"sub_resource": "binding"}),
    Case("no limit", BOTH, pod_of_cores(900), passes="unlimited", fields={"namespace": "team-b"}),
    Case("a static pod", BOTH, STATIC, passes="mirror", fields=NODE),
]


class Told(NamedTuple):
    """An answer of the webhook: the HTTP response, and the outcome that is counted and logged."""

    response: dict[str, Any]
    outcome: str

    @property
    def rejection(self) -> Rejection:
        status = self.response["status"]
        return Rejection(self.outcome, HTTPStatus(status["code"]), status["message"])


def service(
    policy: PolicySnapshot | None, ledgers: MemoryLedgers | None = None, log: CapturingLogger | None = None
) -> Service:
    log = structlog.wrap_logger(log or CapturingLogger(), processors=[])
    return Service(lambda: policy, ledgers or MemoryLedgers(), Metrics(), Gate(), log)


def answer(webhook: Service, path: str, raw: bytes) -> bytes:
    return asyncio.run(webhook.answer(path, raw, ReviewDeadline.after(10)))


def body(manifest: object, **fields: Any) -> bytes:
    request = msgspec.to_builtins(review(manifest, **fields), enc_hook=msgspec.json.decode)
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "request": request}).encode()


def ask(case: Case, path: str, mode: Mode) -> Told:
    log = CapturingLogger()
    policy = policy_for(msgspec.structs.replace(QUOTA, mode=mode))
    sent = answer(service(policy, Ledgers(case.fault), log), path, body(case.manifest, **case.fields))
    [call] = log.calls
    return Told(json.loads(sent)["response"], call.kwargs["outcome"])


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("case", "path"), [pytest.param(case, path, id=f"{path} {case.name}") for case in CASES for path in case.paths]
)
def test_the_answer_to_each_fault(case: Case, path: str, mode: Mode) -> None:
    told = ask(case, path, mode)
    if case.passes:
        assert told == ({"uid": "review-1", "allowed": True}, case.passes)
    elif case.enforced and (mode is Mode.ENFORCE or not any(case.lenient)):
        assert not told.response["allowed"]
        assert told.rejection[:2] == case.enforced[:2]
        assert told.rejection.message.startswith(case.enforced.message)
        assert {"patch", "warnings"}.isdisjoint(told.response), "a rejection must not have a patch or a warning"
    else:
        outcome, warning = case.lenient
        assert told.response["allowed"]
        assert told.outcome == outcome or not outcome
        warnings = told.response.get("warnings", [])
        assert bool(warnings) is (mode is Mode.WARN and bool(warning))
        assert all(each.startswith(warning) for each in warnings)


def test_a_busy_ledger_makes_the_client_retry() -> None:
    busy = next(case for case in CASES if case.name == "too many charges")
    status = ask(busy, "/validate", Mode.ENFORCE).response["status"]
    assert (status["reason"], status["details"]) == ("TooManyRequests", {"retryAfterSeconds": 1})


def test_every_fault_of_a_malformed_pod_is_a_cause_with_its_path() -> None:
    wrong = vcuda_pod({"tencent.com/vcuda-core": 150}, annotations={"tencent.com/vcuda-core-limit": "x"})
    status = ask(Case("", (), wrong), "/mutate", Mode.ENFORCE).response["status"]
    assert status["reason"] == "Invalid"
    assert [cause["field"] for cause in status["details"]["causes"]] == [
        "spec.containers[0].resources.limits[tencent.com/vcuda-core]",
        "metadata.annotations[tencent.com/vcuda-core-limit]",
    ]


def test_a_rejection_lists_a_hundred_faults_and_their_number() -> None:
    wrong = pod(*[container({"tencent.com/vcuda-core": 150})] * 250)
    status = ask(Case("", (), wrong), "/mutate", Mode.ENFORCE).response["status"]
    assert len(status["details"]["causes"]) == MAX_FAULTS + 1
    assert status["message"].endswith("; 150 more faults are not listed")


@pytest.mark.parametrize("namespace", ["", "Team", "a.b", "-a", "a/b", "x" * 64, "x" * 2**20])
def test_an_invalid_namespace_name_is_rejected_and_not_repeated_in_the_message(namespace: str) -> None:
    webhook = service(PolicySnapshot(Quota(default=QUOTA), Nodes(LABELS)))
    response = json.loads(answer(webhook, "/validate", body(SOME, namespace=namespace)))["response"]
    assert (response["allowed"], response["status"]["code"]) == (False, BAD_REQUEST)
    assert len(response["status"]["message"]) < 100


def test_an_admission_has_audit_annotations_and_the_patch() -> None:
    told = ask(Case("", (), vcuda_pod()), "/mutate", Mode.ENFORCE)
    assert told.outcome == "pinned"
    assert told.response["auditAnnotations"]["model"] == "M40"
    [operation, *_] = json.loads(base64.b64decode(told.response["patch"]))
    assert operation == {"op": "add", "path": "/spec/affinity", "value": HELD}


# Reviews that get no decision


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("mode", Mode)
def test_an_unreachable_ledger_admits_nothing(path: str, mode: Mode) -> None:
    with pytest.raises(Unavailable):
        ask(Case("", (), pod_of_cores(100, affinity=HELD), fault=Unavailable("no answer")), path, mode)


@pytest.mark.parametrize("path", BOTH)
def test_before_the_quota_is_read_only_pods_without_gpus_are_admitted(path: str) -> None:
    webhook = service(None)
    assert not webhook.ready
    with pytest.raises(NotReady):
        answer(webhook, path, body(vcuda_pod()))
    assert b'"allowed":true' in answer(webhook, path, body(pod(container())))


def test_a_replica_without_a_policy_says_that_the_quota_is_malformed() -> None:
    log = structlog.get_logger()
    webhook = Service(lambda: None, MemoryLedgers(), Metrics(), Gate(), log, quota_valid=lambda: False)
    with pytest.raises(NotReady, match="the quota ConfigMap is malformed"):
        answer(webhook, "/validate", body(vcuda_pod()))
    ready = make_pages(webhook).test_client().get("/readyz")
    assert (ready.status_code, "the quota ConfigMap is malformed" in ready.text) == (503, True)


@pytest.mark.parametrize("path", [*BOTH, "/quota"])
def test_a_replica_that_stops_answers_until_it_is_closed_and_not_after(path: str) -> None:
    webhook = service(policy_for(QUOTA))
    webhook.gate.leave()
    assert not webhook.ready
    assert answer(webhook, path, body(pod(container())))
    webhook.gate.close()
    with pytest.raises(NotReady):
        answer(webhook, path, body(pod(container())))


@pytest.mark.parametrize("path", [*BOTH, "/quota"])
@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"pod", b'{"apiVersion": "admission.k8s.io/v2", "kind": "AdmissionReview"}']
)
def test_a_body_that_is_no_review_is_a_client_error(path: str, raw: bytes) -> None:
    with pytest.raises(BadReview):
        answer(service(policy_for(QUOTA)), path, raw)


# Texts of a pod in messages and log lines

LONG = "x" * 60_000
CORE_LIMIT, POLICY = "nvidia.com/vcuda-core-limit", "nvidia.com/vgpu-compute-policy"
HOSTILE: dict[str, Manifest] = {
    "a core limit": pod_of_cores(20, affinity=HELD, annotations={CORE_LIMIT: LONG}),
    "a compute policy": pod_of_cores(20, affinity=HELD, annotations={POLICY: LONG}),
    "a key of an annotation": pod_of_cores(20, affinity=HELD, annotations={f"{LONG}/vgpu-compute-policy": "none"}),
    "a key that gives devices": pod(container(), annotations={f"devices.nri.io/{LONG}": ""}),
    "a wanted model": pod_of_cores(100, annotations={MODELS_ANNOTATION: LONG}),
    "a wanted card type": vcuda_pod({"nvidia.com/gpu": 1}, annotations={"nvidia.com/use-gputype": LONG[:8_000]}),
    "a runtime class": pod(container(), runtimeClassName=f"nvidia-{LONG}"),
    "a variable": pod(
        container(
            {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 5},
            env=[{"name": f"CUDA_DEVICE_MEMORY_LIMIT_{LONG}", "value": "1"}],
        ),
        affinity=HELD,
    ),
    "a resource": pod(container({f"nvidia.com/{LONG[:300]}": 1})),
    "many resources": pod(container({f"nvidia.com/{LONG[:240]}{number}": 1 for number in range(200)})),
    "a quantity": pod(container({"nvidia.com/gpu": LONG})),
    "a quantity of digits": pod(container({"nvidia.com/gpu": "1" * 60_000})),
    "a scheduler": pod_of_cores(100, affinity=HELD, schedulerName=LONG),
    "models of the affinity": pod_of_cores(100, affinity=held_to(LONG)),
    "records": pod_of_cores(100, affinity=HELD, annotations={f"tencent.com/predicate-gpu-idx-{LONG}": "0"}),
    "a name": {**pod_of_cores(150), "metadata": {"name": LONG, "uid": "u-1"}},
    "a node": pod_of_cores(100, affinity=HELD, nodeName=LONG),
}


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.WARN])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_long_text_of_a_pod_is_cut_in_every_message_and_log_line(hostile: str, mode: Mode, path: str) -> None:
    """Values are cut after 100 characters. The name of a pod, key or resource may be longer: it locates a fault."""
    manifest, log = HOSTILE[hostile], CapturingLogger()
    policy = policy_for(msgspec.structs.replace(QUOTA, mode=mode))
    pin_settings = PinSettings(scheduler="gpu-scheduler")
    asked = body(manifest, name=manifest["metadata"].get("name", ""))
    sent = answer(service(msgspec.structs.replace(policy, pin_settings=pin_settings), log=log), path, asked)
    response = json.loads(sent)["response"]
    [call] = log.calls
    status = response.get("status", {})
    causes = status.get("details", {}).get("causes", ())
    assert all(len(each["field"] + each["message"]) <= 2 * MAX_FAULT_LENGTH + 99 for each in causes)
    told = [status.get("message", ""), *response.get("warnings", ()), *map(str, call.kwargs.values())]
    assert all(len(text) <= MAX_TEXT_LENGTH + 40 for text in told)
    located = hostile.startswith(("a key", "a name", "a resource", "many resources"))
    longest = MAX_FAULT_LENGTH if located else MAX_VALUE_LENGTH
    assert all("x" * (longest + 1) not in text for text in told)
