"""An example quota and example nodes, and the answers of the webhook to an example pod."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from tools.reference.examples import LABELS, MODEL, POOL, container, pod, policy_for, requires, review
from tools.reviews import mutate, validate
from vcuda.admission_review import AdmissionResponse, ReviewDeadline
from vcuda.placement.nodes import Nodes
from vcuda.placement.patches import PinSettings
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, NamespaceQuota
from vcuda.quota.well_known import STORABLE_SECONDS
from webhook.caches import RecentChoices, SkippedMutate
from webhook.ledger.charging import ChargeRequest, Decision, Ledgers
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.decisions import Creation

TEAM = NamespaceQuota({"M40": Limit(800), "P100": Limit(250)}, pools=("public",))
DATED = parse_quota(
    "team-a: {quota: {M40: {cards: 0.5, memory: 8Gi}}, time_zone: Europe/Berlin, grants: ["
    "{M40: {cards: 1, memory: 16Gi}, until: 2026-12-01}, {M40: {cards: 4, memory: 64Gi}, weekly: Sat-Sun}]}"
).namespaces["team-a"]
SMALL = NamespaceQuota({"M40": Limit(100, 8192)})
CARD, BIG = {"tencent.com/vcuda-core": 100}, {"tencent.com/vcuda-core": 200}
NO_SETTINGS = PinSettings()
NODES = Nodes.of(
    {
        "one": {MODEL: "M40", POOL: "public"},
        "two": {MODEL: "M40", POOL: "private"},
        "three": {MODEL: "P100", POOL: "public"},
    },
    LABELS,
)


def charge(
    limits: Mapping[str, Any],
    quota: NamespaceQuota,
    ledgers: Ledgers | None = None,
    pin_settings: PinSettings = NO_SETTINGS,
    nodes: Nodes = NODES,
    *,
    skipped: SkippedMutate | None = None,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of the webhook's path /validate for a pod. By default, its affinity requires the model M40."""
    manifest = pod(container(limits), **{"metadata": {"uid": "one"}, "affinity": requires("M40"), **fields})
    policy = policy_for(quota, nodes)
    policy = msgspec.structs.replace(policy, pin_settings=pin_settings, storable_seconds=STORABLE_SECONDS)
    deadline = ReviewDeadline.after(1)
    ours = ledgers or MemoryLedgers()
    return asyncio.run(validate(Creation(review(manifest), policy, ours, deadline=deadline, skipped=skipped)))


class Answering(MemoryLedgers):
    """A test double of the ledgers, which answers every request for a charge with ``answer``."""

    def __init__(self, answer: Decision) -> None:
        super().__init__()
        self._answer = answer

    async def charge(self, _demand: ChargeRequest) -> Decision:
        return self._answer


def mutated(
    limits: Mapping[str, Any],
    quota: NamespaceQuota,
    nodes: Nodes = NODES,
    *,
    pin_settings: PinSettings = NO_SETTINGS,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of the webhook's path /mutate for an example pod."""
    policy = msgspec.structs.replace(policy_for(quota, nodes), pin_settings=pin_settings)
    return asyncio.run(
        mutate(
            Creation(
                review(pod(container(limits), **fields)), policy, MemoryLedgers(), RecentChoices(), ReviewDeadline()
            )
        )
    )
