"""Calls the code of /mutate and /validate for a pod, with ledgers in memory. `EVERY_NODE` has every kind of node."""

import asyncio
import copy
import itertools
from typing import Any

import jsonpatch
import msgspec

from tests.builders import Manifest, held_to, policy_for, review
from tests.strategies import MODELS, NODE_NAMES, POOLS, UNKNOWN_NODE, VALUES_OF
from vcuda.admission_review import AdmissionResponse, ReviewDeadline
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import Limit, NamespaceQuota
from vcuda.requests.config import parse_config
from webhook.caches import RecentChoices
from webhook.ledger.charging import Ledgers
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import answers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

DEADLINE = 5.0


def creation(
    manifest: Manifest, policy: PolicySnapshot, ledgers: Ledgers, choices: RecentChoices | None = None, **fields: Any
) -> Creation:
    """Return a review of a new pod, five seconds before its deadline. ``fields``: more fields of the request."""
    deadline = ReviewDeadline(DEADLINE, lambda: 0.0)
    return Creation(review(manifest, **fields), policy, ledgers, choices or RecentChoices(), deadline)


class Webhook:
    """Decides about pods of namespace team-a, as the webhook does at /mutate and /validate."""

    def __init__(self, policy: PolicySnapshot) -> None:
        self.policy = policy
        self.ledgers = MemoryLedgers()
        self._choices = RecentChoices()

    def mutate(self, pod: Manifest) -> AdmissionResponse:
        return asyncio.run(answers.answer("/mutate", Creation(review(pod), self.policy, self.ledgers, self._choices)))

    def validate(self, pod: Manifest) -> AdmissionResponse:
        """Return the answer of /validate. The API server has given the pod a uid before it calls /validate."""
        stored = review({**pod, "metadata": {**pod["metadata"], "uid": "u-1"}})
        return asyncio.run(answers.answer("/validate", Creation(stored, self.policy, self.ledgers, self._choices)))


def validated_on_m40(manifest: Manifest, *allow: Allowance, units: str = "", **policy: Any) -> AdmissionResponse:
    """Return the answer of /validate for a pod that is pinned to M40, of which the quota has 8 cards.

    ``allow``: the quota's allow. ``units``: the value of gpu_units. ``policy``: other fields of the `PolicySnapshot`.
    """
    quota = NamespaceQuota({"M40": Limit(800)}, allow=frozenset(allow))
    known = parse_config({"gpu_quota": "{}", "gpu_units": units or "{}"}).resources
    asked = msgspec.structs.replace(policy_for(quota), resources=known, **policy)
    return Webhook(asked).validate({**manifest, "spec": {**manifest["spec"], "affinity": held_to("M40")}})


def patched(pod: Manifest, patch: object) -> Manifest:
    result: Manifest = jsonpatch.apply_patch(copy.deepcopy(pod), msgspec.json.encode(patch))
    return result


EVERY_NODE = [
    (name, {key: value for key, value in zip(VALUES_OF, values, strict=True) if value is not None})
    for values in itertools.product(
        (None, *MODELS, "V100"), (None, *POOLS, "spare"), (None, "a", ""), (None, "0", "4", "5", "06", str(2**63 - 1))
    )
    for name in (*NODE_NAMES[:2], UNKNOWN_NODE)
]
"""Pairs of a node's name and labels: nodes of all models and pools, including those without a quota."""
