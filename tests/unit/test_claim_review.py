"""Tests of the answers of /mutate and /validate for ResourceClaims, ResourceClaimTemplates, and pods that name them."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from examples.claims import A100, HAMI, M40, NODES, NVIDIA, claim, claim_policy, entry, first_of, share, spec, template
from tests.both_calls import patched
from tests.builders import POOL, Manifest, container, pod, required, requirement, review, term, vcuda_pod
from tests.tables import cases
from vcuda.admission_review import AdmissionRequest, AdmissionResponse, GroupVersionKind, UserInfo
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.placement.nodes import CORDON, NodeStates, Taint
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Quota, Usage
from vcuda.requests.config import parse_config
from webhook.caches import RecentChoices
from webhook.ledger.charging import ChargeRequest, Decision, RetryLater
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import answers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

QUOTA = NamespaceQuota({"A100": Limit(400), "M40": Limit(200)})
CONTROLLER = UserInfo("system:serviceaccount:kube-system:resource-claim-controller")
SCHEDULER = UserInfo("system:kube-scheduler")
NO_MODEL_SELECTED = "but the requests of this claim select no single model"


class Busy(MemoryLedgers):
    """Ledgers of a test. Every answer comes after the caller's deadline."""

    async def charge(self, request: ChargeRequest) -> Decision:
        return RetryLater(f"too many pods of {request.namespace} are being created at once", soon=True)


class Server:
    """Sends objects in namespace team-a to /mutate and /validate."""

    def __init__(self, quota: NamespaceQuota = QUOTA, *, served: bool = True) -> None:
        whole = Quota({"team-a": quota}, version="41")
        self.policy = PolicySnapshot(
            whole,
            NODES,
            storable_seconds=75,
            claims=claim_policy(quota=whole) if served else None,
        )
        self.ledgers = MemoryLedgers()
        self.choices = RecentChoices()

    def mutate(self, manifest: Manifest, **fields: object) -> AdmissionResponse:
        request = self._request(manifest, fields)
        return asyncio.run(answers.answer("/mutate", Creation(request, self.policy, self.ledgers, self.choices)))

    def validate(self, manifest: Manifest, uid: str = "u-1", **fields: object) -> AdmissionResponse:
        stored = {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
        request = self._request(stored, fields)
        return asyncio.run(answers.answer("/validate", Creation(request, self.policy, self.ledgers, self.choices)))

    def create(self, manifest: Manifest, uid: str = "u-1") -> AdmissionResponse:
        """Send a new object through /mutate and then /validate, as the API server does."""
        proposed = self.mutate(manifest)
        return self.validate(patched(manifest, proposed.patch), uid) if proposed.allowed else proposed

    def used(self) -> Mapping[str, Charge]:
        return {model: usage.used for model, usage in asyncio.run(self.ledgers.usage("team-a")).items()}

    @staticmethod
    def _request(manifest: Manifest, fields: Mapping[str, Any]) -> AdmissionRequest:
        group, _, version = manifest["apiVersion"].rpartition("/")
        return review(manifest, kind=GroupVersionKind(group, version, manifest["kind"]), **fields)


def held(model: str, device_class: str = NVIDIA) -> Manifest:
    """Return a claim's request for devices, with the selector by which /mutate restricts the request to a model."""
    return entry(device_class, write_pin(ClaimPin(device_class, (model.lower(),))))


def test_a_claim_is_pinned_to_the_first_model_with_room_and_charged_by_its_uid() -> None:
    server = Server()
    answer = server.mutate(claim(entry(count=2)))
    assert (answer.outcome, answer.model, answer.scheme) == ("pinned", "A100", NVIDIA)
    stored = patched(claim(entry(count=2)), answer.patch)
    assert not server.mutate(stored).patch, "a second call on the result must change nothing"
    charged = server.validate(stored, "claim-1")
    assert (charged.outcome, charged.model) == ("charged", "A100")
    server.validate(stored, "claim-1")
    assert server.used() == {"A100": Charge(200, 0, 200)}, "repeated calls must be charged once"


def test_the_order_of_the_requests_of_a_claim_makes_no_new_scheme() -> None:
    both = entry(NVIDIA), {**entry(HAMI), "name": "other"}
    schemes = {Server().mutate(claim(*each)).scheme for each in (both, both[::-1])}
    assert len(schemes) == 1


@cases(
    "asked, expected",
    NVIDIA_s_driver_from_a_template=(entry(count=1, allocationMode="ExactCount"), Charge(100, 0, 100)),
    NVIDIA_s_driver_a_partition=(
        entry("mig.nvidia.com", f"device.attributes['{NVIDIA}'].profile == '3g.20gb'"),
        Charge(50, 20480),
    ),
    a_claim_by_HAMi_DRA_s_webhook=(
        {
            **share(cores="50", memory="10737418240"),
            "selectors": [
                {"cel": {"expression": f'device.attributes["{HAMI}"].type == "hami-gpu"'}},
                {"cel": {"expression": f'device.attributes["{HAMI}"].productName in ["{A100}"]'}},
            ],
            "allocationMode": "ExactCount",
            "count": 1,
        },
        Charge(50, 10240),
    ),
    a_claim_by_vgpu_manager_s_webhook=(share("vgpu-manager", cores="30", memory="4000Mi"), Charge(30, 4000)),
)
def test_claims_as_drivers_and_webhooks_write_them_are_charged(asked: Manifest, expected: Charge) -> None:
    server = Server()
    assert server.create(claim(asked)).outcome == "charged"
    assert server.used() == {"A100": expected}


def test_a_claim_over_quota_gets_403_without_retry_after() -> None:
    server = Server()
    for uid in ("u-1", "u-2"):
        assert server.create(claim(held("M40")), uid).allowed
    for answer in (server.mutate(claim(held("M40"))), server.validate(claim(held("M40")), "u-3")):
        assert (answer.allowed, answer.status, answer.retry_after) == (False, HTTPStatus.FORBIDDEN, None)
        assert "exceeded quota: M40 in namespace team-a, requested: 1 card, used: 2 (2 pending)" in answer.message
    server.ledgers = Busy()
    answer = server.validate(claim(held("M40")), "u-4")
    assert (answer.outcome, answer.status, answer.retry_after) == ("busy", HTTPStatus.FORBIDDEN, None)


@cases(
    "manifest",
    mutate_was_not_called=claim(),
    an_annotation_decides_nothing=claim(annotations={"quota.vcuda.io/model": "M40"}),
    a_request_was_added_after_mutate=claim(held("M40"), entry()),
)
def test_a_claim_that_is_not_pinned_to_one_model_of_the_quota_is_rejected(manifest: Manifest) -> None:
    server = Server()
    answer = server.validate(manifest)
    assert (answer.outcome, answer.status) == ("not-pinned", HTTPStatus.FORBIDDEN)
    assert "(A100: 4 cards, M40: 2 cards)" in answer.message
    assert NO_MODEL_SELECTED in answer.message
    assert server.used() == {}


@pytest.mark.parametrize("create", [claim, template])
@cases(
    "asked, value, rejected",
    a_share_without_a_limit=(share("vgpu-manager", cores="30"), "none", True),
    a_share_with_a_limit=(share("vgpu-manager", cores="30"), "Balance", False),
    a_share_as_one_alternative=(first_of(entry(), share(cores="30")), "none", True),
    a_whole_card=(entry(), "none", False),
)
def test_a_share_by_a_claim_keeps_its_limit_unless_the_quota_allows_otherwise(
    create: Callable[..., Manifest], asked: Manifest, value: str, *, rejected: bool
) -> None:
    """vgpu-manager reads the limit of a share from the annotations of the claim, which come from its template."""
    key = "example.com/vgpu-compute-policy"
    manifest = create(asked)
    about = manifest if create is claim else manifest["spec"]
    about["metadata"] = {**about.get("metadata", {}), "annotations": {key: value}}
    under = "" if create is claim else "spec."
    expected = [f"{under}metadata.annotations[{key}]"] if rejected else []
    assert [fault.path for fault in Server().validate(manifest).faults] == expected
    allowing = NamespaceQuota(QUOTA.limits, allow=frozenset({Allowance.COMPUTE_POLICY}))
    assert Server(allowing).validate(manifest).faults == ()


POLICY_NOTE = {"nvidia.com/vgpu-compute-policy": "none"}


@pytest.mark.parametrize("named_by", ["resourceClaimName", "resourceClaimTemplateName"])
@pytest.mark.parametrize(
    ("metadata", "fields", "path"),
    [
        ({"annotations": POLICY_NOTE}, {}, "metadata.annotations[nvidia.com/vgpu-compute-policy]"),
        ({}, {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]}, "spec.containers[0].env[0]"),
        ({}, {"env": [{"name": "GPU_CORE_UTILIZATION_POLICY", "value": "disable"}]}, "spec.containers[0].env[0]"),
    ],
)
def test_a_pod_cannot_remove_the_limit_of_the_share_of_its_claim(
    named_by: str, metadata: Manifest, fields: Manifest, path: str
) -> None:
    asking = pod(container(**fields), metadata=metadata, resourceClaims=[{"name": "c", named_by: "mine"}])
    answer = Server().validate(asking)
    assert (answer.status, [fault.path for fault in answer.faults]) == (HTTPStatus.UNPROCESSABLE_ENTITY, [path])


def test_malformed_claims_are_422_with_the_path_and_never_reach_the_ledger() -> None:
    server = Server()
    for answer in (server.mutate(claim(entry("foo"))), server.validate(claim(entry("foo")))):
        assert (answer.outcome, answer.status) == ("malformed", HTTPStatus.UNPROCESSABLE_ENTITY)
        assert [fault.path for fault in answer.faults] == ["spec.devices.requests[0].exactly.deviceClassName"]
    [fault] = server.validate(template(entry("foo"))).faults
    assert fault.path == "spec.spec.devices.requests[0].exactly.deviceClassName"
    unread = {**claim(), "spec": {"devices": []}}
    assert server.validate(unread).status is HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
@pytest.mark.parametrize(
    ("manifest", "outcome", "warned"),
    [
        (claim(held("M40")), "charged", ""),
        (claim({**held("M40"), "count": 3}), "over-quota-allowed", "larger than the GPU quota"),
        (claim(), "unpinned", NO_MODEL_SELECTED),
        (claim(entry("foo")), "unpinned", "malformed GPU request"),
        (template(entry(count=9)), "template", "can never fit"),
    ],
)
def test_warn_and_audit_reject_nothing(mode: Mode, manifest: Manifest, outcome: str, warned: str) -> None:
    answer = Server(NamespaceQuota({"M40": Limit(200)}, mode=mode)).validate(manifest)
    assert (answer.allowed, answer.outcome) == (True, outcome)
    assert warned in "; ".join(answer.warnings) if mode is Mode.WARN else answer.warnings == ()


def test_only_the_schedulers_own_extended_resource_claims_are_admitted() -> None:
    server = Server()
    extended = claim(annotations={"resource.kubernetes.io/extended-resource-claim": "true"})
    for answer in (server.mutate(extended, user_info=SCHEDULER), server.validate(extended, user_info=SCHEDULER)):
        assert answer == AdmissionResponse("scheduler")
    assert server.validate(extended).outcome == "not-pinned"
    assert server.validate(extended, user_info=CONTROLLER).outcome == "not-pinned"
    assert server.used() == {}
    assert server.create(extended).outcome == "charged", "a user's claim with the annotation is charged like any other"


def test_a_setting_names_all_schedulers_whose_claims_are_admitted() -> None:
    server, volcano = Server(), UserInfo("system:serviceaccount:volcano:scheduler")
    assert server.validate(claim(), user_info=volcano).outcome == "not-pinned"
    server.policy = msgspec.structs.replace(server.policy, scheduler_users=frozenset({volcano.username}))
    assert server.validate(claim(), user_info=volcano) == AdmissionResponse("scheduler")
    assert server.validate(claim(), user_info=SCHEDULER).outcome == "not-pinned"


def test_claims_of_the_schedulers_that_a_scheme_names_are_admitted() -> None:
    settings = {"gpu_quota": "{}", "gpu_schemes": "hami: {service_accounts: [hami-system/hami-scheduler]}"}
    server, hami = Server(), UserInfo("system:serviceaccount:hami-system:hami-scheduler")
    assert server.validate(claim(), user_info=hami).outcome == "not-pinned"
    server.policy = msgspec.structs.replace(server.policy, resources=parse_config(settings).resources)
    for user in (hami, SCHEDULER):
        assert server.validate(claim(), user_info=user) == AdmissionResponse("scheduler")
    assert server.validate(claim(), user_info=CONTROLLER).outcome == "not-pinned"


@pytest.mark.parametrize(
    ("manifest", "fields", "outcome"),
    [
        (claim(entry("compute-domain-default-channel.nvidia.com")), {}, "ignored"),
        ({**claim(), "spec": {}}, {}, "ignored"),
        ({**claim(), "spec": {"devices": {"requests": []}}}, {}, "ignored"),
        (claim(), {"operation": "UPDATE"}, "ignored"),
        (claim(), {"operation": "UPDATE", "sub_resource": "status"}, "ignored"),
        (claim(), {"namespace": "team-b"}, "unlimited"),
        (template(), {"namespace": "team-b"}, "unlimited"),
    ],
)
def test_other_requests_are_ignored(manifest: Manifest, fields: dict[str, str], outcome: str) -> None:
    assert Server().mutate(manifest, **fields) == Server().validate(manifest, **fields) == AdmissionResponse(outcome)


def test_a_call_for_another_kind_asks_to_correct_the_rules() -> None:
    assert Server().validate({**claim(), "kind": "ResourceSlice"}).status is HTTPStatus.BAD_REQUEST


def test_a_dry_run_releases_the_choice_of_no_other_object() -> None:
    server, chosen = Server(), {"A100": Usage(Charge(100, 0, 100))}
    server.mutate(claim())
    for dry_run, counted in ((True, chosen), (False, {})):
        server.validate(claim(held("A100")), dry_run=dry_run)
        assert server.choices.on_top_of({}, "team-a") == counted


def test_a_dry_run_is_decided_and_not_charged() -> None:
    server = Server()
    assert server.mutate(claim(), dry_run=True).warnings[0].startswith("would be pinned to A100")
    assert server.validate(claim(held("M40")), dry_run=True).outcome == "charged"
    assert server.used() == {}


def test_no_claim_is_charged_without_a_uid() -> None:
    assert Server().validate(claim(held("M40")), uid="").status is HTTPStatus.BAD_REQUEST


def test_a_claim_is_never_free_if_no_device_is_published() -> None:
    server = Server(served=False)
    assert server.create(claim()).outcome == "charged"
    assert server.used() == {"A100": Charge(100, 0, 100)}


OF_M40 = f'device.attributes["{NVIDIA}"].productName == "{M40}"'
MINE, FROM_TEMPLATE = {"resourceClaimName": "mine"}, {"resourceClaimTemplateName": "train"}


def claiming(source: Manifest = MINE) -> Manifest:
    return pod(container(), resourceClaims=[{"name": "c", **source}])


@cases(
    "asked, used, allowed, told",
    fits=(spec(entry(count=4)), 0, True, ""),
    not_now=(spec(entry(count=4)), 1, True, "must wait until the quota is free"),
    never=(spec(entry(count=5)), 0, False, "can never fit"),
    of_no_allowed_model=(spec(entry(NVIDIA, OF_M40)), 0, False, "may use no GPU model"),
    malformed=(spec(entry("foo")), 0, False, "no value is configured"),
    no_GPU=(spec(entry("compute-domain-daemon.nvidia.com")), 0, True, ""),
)
def test_a_new_template_is_checked_and_not_charged(asked: Manifest, used: int, allowed: bool, told: str) -> None:
    server = Server(NamespaceQuota({"A100": Limit(400)}))
    if used:
        server.create(claim(entry(count=used)))
    before = server.used()
    answer = server.create({**template(), "spec": {"spec": asked}})
    assert (answer.allowed, told in "; ".join([answer.message, *answer.warnings])) == (allowed, True)
    assert answer.status in (HTTPStatus.OK, HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY)
    assert server.used() == before


def test_a_pod_with_claims_is_admitted_only_if_claims_are_charged() -> None:
    for source in (MINE, FROM_TEMPLATE):
        assert Server().create(claiming(source)) == AdmissionResponse("claims")
    rejection = Server(served=False).create(claiming())
    assert [fault.path for fault in rejection.faults] == ["spec.resourceClaims"]


def test_a_pod_with_both_kinds_of_requests_is_charged_for_its_own() -> None:
    server = Server(NamespaceQuota({"A100": Limit(400)}))
    both = vcuda_pod(resourceClaims=[{"name": "c", **FROM_TEMPLATE}])
    server.create(claim(entry()))
    answer = server.create(both, "pod-1")
    assert (answer.outcome, server.used()) == ("charged", {"A100": Charge(200, 0, 200)})


def test_a_pod_with_claims_stays_in_the_pools_of_its_namespace() -> None:
    server = Server(NamespaceQuota({"A100": Limit(400)}, pools=("public",)))
    answer = server.mutate(claiming())
    in_pool = required(term(requirement(POOL, "In", "public")))
    assert patched(claiming(), answer.patch)["spec"]["affinity"] == in_pool
    assert server.validate(patched(claiming(), answer.patch)).outcome == "claims"
    rejection = server.validate(claiming())
    assert (rejection.outcome, "the pools of namespace team-a: public" in rejection.message) == ("not-pinned", True)


def test_the_extended_resource_of_a_class_is_rejected_until_it_is_counted() -> None:
    server = Server()
    facts = {**server.policy.claims.devices.classes} if server.policy.claims else {}
    facts["own"] = msgspec.structs.replace(facts[NVIDIA], extended_resource="example.com/fast")
    devices = msgspec.structs.replace(server.policy.claim_policy.devices, classes=facts)
    claims = msgspec.structs.replace(server.policy.claim_policy, devices=devices)
    server.policy = msgspec.structs.replace(server.policy, claims=claims)
    [fault] = server.validate(vcuda_pod({"example.com/fast": 1})).faults
    assert "`example.com/fast: {cards: 1}`" in fault.message


@cases(
    "taint, nodes, model, told",
    cordoned=(CORDON, 2, "M40", "after A100 (its node is cordoned)"),
    not_ready=(Taint("node.kubernetes.io/not-ready"), 2, "M40", "after A100 (its node is not ready)"),
    no_node_left=(CORDON, 3, "A100", "; the pod must wait for a node of A100: its node is cordoned"),
    tainted=(Taint("dedicated"), 2, "A100", ""),
)
def test_a_claim_gets_a_model_with_a_node_that_is_ready_and_not_cordoned_first(
    taint: Taint, nodes: int, model: str, told: str
) -> None:
    """The pod of the claim and its tolerations are unknown, so taints of nodes other than cordons do not count.

    ``nodes``: the first bit is the node with M40, and the second is the node with A100.
    """
    server = Server()
    server.policy = msgspec.structs.replace(server.policy, states=NodeStates({taint: nodes}))
    answer = server.mutate(claim())
    assert (answer.model, told in answer.reason) == (model, True)
    assert [told in each for each in answer.warnings] == [True] * bool(told)


def test_with_require_nodes_a_claim_gets_no_model_of_which_no_node_publishes_devices() -> None:
    """The answer to a template must not depend on the devices that exist now, so only /validate decides about it."""
    quota = NamespaceQuota({"V100": Limit(400)}, require_nodes=True)
    answer = Server(quota).mutate(claim())
    assert not answer.allowed
    told = "V100 is excluded by `require_nodes` of the quota, because no node publishes such devices now"
    assert answer.message.endswith(told)
    assert Server(NamespaceQuota(quota.limits)).mutate(claim()).allowed
    assert Server(quota).validate(template()).allowed
