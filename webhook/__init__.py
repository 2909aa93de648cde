"""The admission webhook, which the API server calls on three paths.

/mutate picks a GPU model and pins the pod to nodes with this model. /validate charges the pod to the quota of its
namespace. /quota checks edits of the quota ConfigMap. A request passes through `webhook.server`, `webhook.admission`,
`webhook.review` and `webhook.ledger`, in this order. The command line is in `webhook.cli`.
"""
