"""The controller: settles the ledgers and removes what deleted pods leave behind.

`cli` is the command. When this replica leads, `manager` starts a package for each duty: `settle`, `retry`,
`violations`, `garbage` and `extender`. They share the watches in `pods` and `claims`, and the queues of `workqueue`.
"""
