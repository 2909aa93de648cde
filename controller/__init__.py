"""The controller: settles the ledgers (recounts them from the stored objects), and removes stale data of pods.

`cli` defines the command. While this replica leads, `manager` runs a package for each task: `settle`, `retry`,
`violations`, `garbage`, `discover` and `extender`. They share the watches in `pods` and `claims`, and `workqueue`.
"""
