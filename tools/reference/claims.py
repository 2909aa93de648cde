"""The messages about ResourceClaims and their templates in docs/reference.md. The product's own code produces them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from examples import claims as made
from tools.reference.examples import Manifest, review
from tools.reference.told import Chapter, Told
from tools.reviews import mutate, validate
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.claims.digest import MAX_ASKED_BYTES
from vcuda.claims.names import CLAIM
from vcuda.claims.pin import MAX_PIN_LENGTH, ClaimPin, write_pin
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Quota
from vcuda.requests.resources import WHOLE_CARD, GpuResources
from webhook.caches import RecentChoices
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

NOTHING: Mapping[str, Charge] = MappingProxyType({})
A_FEW = NamespaceQuota({"A100": Limit(100)})
TEAM = NamespaceQuota({"M40": Limit(800), "A100": Limit(200)})
NO_DRIVER = made.device_class('device.driver.startsWith("gpu")')
CLASSES = {**made.CLASSES, "gpu": NO_DRIVER}
UNITS = GpuResources(own_units={"deviceclass/gpu": WHOLE_CARD})
HELD = [made.entry(made.NVIDIA, write_pin(ClaimPin(made.NVIDIA, (name,)))) for name in ("m40", "a100")]
HOW = (
    "kubectl prints messages about ResourceClaims and their templates in the same way as messages"
    " about pods. Kubernetes' claim controller creates claims from templates. If the webhook rejects"
    " a claim from a template, the pod of the claim stays Pending, and the pod's Event"
    " `FailedResourceClaimCreation` has the message. The claim is created again when quota is"
    " released. If a shortage of quota is expected to end within seconds, a pod gets the status 429,"
    " but a claim gets 403."
)


def chapters() -> tuple[Chapter, ...]:
    return (Chapter("ResourceClaims and their templates: 403 and 422", HOW, tuple(_told())),)


def _ask(
    manifest: Manifest, quota: NamespaceQuota = TEAM, charged: Mapping[str, Charge] = NOTHING, **rows: Any
) -> AdmissionResponse:
    whole = Quota({"team-a": quota})
    claims = made.claim_policy(classes=CLASSES, quota=whole, resources=UNITS, rows=rows)
    policy = PolicySnapshot(whole, made.NODES, claims=claims)
    kind = GroupVersionKind("resource.k8s.io", "v1", manifest["kind"])
    request, ledgers, choices = review(manifest, kind=kind), MemoryLedgers({"team-a": charged}), RecentChoices()
    if manifest["kind"] == CLAIM and not manifest["metadata"].get("uid"):
        return asyncio.run(mutate(Creation(request, policy, ledgers, choices)))
    return asyncio.run(validate(Creation(request, policy, ledgers, choices)))


def _told() -> Sequence[Told]:
    stored = made.claim(made.entry(), uid="one")
    warns = NamespaceQuota({"A100": Limit(100)}, mode=Mode.WARN)
    unread = {**made.claim(), "spec": []}
    malformed = [
        made.entry("nic"),
        made.entry("gpu"),
        made.entry(allocationMode="All"),
        made.entry(adminAccess=True),
        made.entry(count=0),
        made.entry("mig.nvidia.com", f"device.attributes['{made.NVIDIA}'].profile == '9g.5gb'"),
        made.entry(selectors=[made.selector("true")] * 32),
        made.share(cores="-5", memory="9e18", core="5"),
        {"firstAvailable": []},
    ]
    configured = made.claim(*malformed)
    configured["spec"]["devices"]["config"] = [{"opaque": {"driver": made.HAMI}}]
    waiting = _ask(made.template(), A_FEW, charged={"A100": Charge(100, 0, 100)}).warnings
    product = f'device.attributes["{made.NVIDIA}"].productName == "{made.M40}"'
    entries = [made.first_of(*[made.entry()] * 8)] * 9
    large = made.claim(*[made.entry()] * 33), made.claim(*entries), made.claim(made.entry("x" * MAX_ASKED_BYTES))
    forged = [write_pin(ClaimPin(made.HAMI, (name * (MAX_PIN_LENGTH - 200),))) for name in "abcd"]
    return [
        Told(
            _ask(configured).message,
            (
                "Change the claim as the message says. If the message asks for a line in `gpu_units`, an"
                " administrator must add the line to the quota ConfigMap."
            ),
        ),
        *(Told(_ask(each).message, "Write a smaller claim.") for each in large),
        *(
            Told(_ask(made.claim(made.entry(made.NVIDIA, *forged[:n]))).message, "Write a smaller claim.")
            for n in (3, 4)
        ),
        Told(_ask(made.claim(), NamespaceQuota({})).message, "Ask for quota of a GPU model."),
        Told(_ask(made.claim(*HELD)).message, "Remove the selector that excludes the model you want."),
        Told(
            _ask(made.claim(), NamespaceQuota({"V100": Limit(100)}, require_nodes=True)).message,
            "The quota has `require_nodes: true`. Wait until a node publishes such devices, or ask for quota of another"
            " model.",
        ),
        Told(
            _ask(made.claim(made.entry(made.NVIDIA, product)), NamespaceQuota({"A100": Limit(100)})).message,
            "Remove the selector that excludes the model you want.",
        ),
        Told(
            _ask(made.claim(), A_FEW, A100=("*",), M40=("*",)).message,
            "Correct the products of the models in `gpu_models`.",
        ),
        Told(
            _ask(stored).message,
            (
                "Check that the mutating webhook configuration of vcuda quota exists, and that no other webhook"
                " changes the claim after that webhook."
            ),
        ),
        Told(_ask(unread).message, "Correct the claim: the API server would reject it too."),
        Told(
            _ask({**stored, "kind": "ResourceSlice"}).message,
            ("The status is 400. Correct the webhook configuration, which sends objects of another kind."),
        ),
        Told(_ask(made.template(made.entry(count=9))).message, "Request less, or ask for more quota."),
        *(Told(text, "Nothing: a pod with this template waits, and starts by itself.") for text in waiting),
        *(Told(text, "") for text in _ask(made.template(made.entry(count=9)), warns).warnings),
    ]
