"""The controller: recounts the quota ledgers from the stored objects, and removes stale data of pods.

The module `cli` defines the command. While this replica is the leader, `manager` runs one package for each duty:
`recount`, `retry`, `violations`, `garbage`, `discover` and `extender`. All these packages share the watches in `pods`
and `claims`, and the reconcile loop in `workqueue`.
"""
