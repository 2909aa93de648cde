"""What the benchmarks compare is the same work."""

import asyncio
import json

import msgspec

from bench.plane import gpu_pod
from bench.servers import PIN
from tests.builders import policy_for, review
from vcuda.quota.model import Limit, NamespaceQuota
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.pod_review import mutate
from webhook.review.verdicts import Creation


def test_the_constant_pin_of_other_webhooks_is_the_patch_with_which_ours_answers() -> None:
    policy = policy_for(NamespaceQuota({"M40": Limit(800)}))
    answer = asyncio.run(mutate(Creation(review(gpu_pod()), policy, MemoryLedgers())))
    assert [msgspec.to_builtins(operation) for operation in answer.patch] == json.loads(PIN)
