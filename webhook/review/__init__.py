"""Decides admission reviews.

1. Read: `pod_review` and `claim_review` read the object, with the quota and the nodes in one `context.PolicySnapshot`.
2. Decide: the same modules choose a GPU model and charge the object, by the functions in `decisions`, which calls
   `webhook.ledger`. `quota_edit` decides edits of the quota ConfigMap. Each decision is a value, a verdict.
3. Answer: `answers` calls the other modules, and gives each verdict its status and its text.
"""
