"""The admission webhook: /mutate picks a model and pins the pod, /validate charges the quota, /quota checks edits.

A request passes `webhook.server`, `webhook.admission`, `webhook.review` and `webhook.ledger`, in this order. The
command is `webhook.cli`.
"""
