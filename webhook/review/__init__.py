"""Decides admission reviews.

`pod_review` decides reviews of pods, `claim_review` of ResourceClaims, and `quota_edit` of the quota ConfigMap. Each
decision uses the quota and the nodes in one `context.PolicySnapshot`. `verdicts` charges the ledger through
`webhook.ledger`, and writes the answer.
"""
