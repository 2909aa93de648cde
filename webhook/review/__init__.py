"""Decides a review: `pod_review` for pods, `claim_review` for ResourceClaims, `quota_edit` for the quota ConfigMap.

A decision is made by the `context.PolicySnapshot` of that moment. `verdicts` charges through `webhook.ledger` and
writes the answer.
"""
