"""The controller: settles the ledgers and removes what deleted pods leave behind.

`cli` is the command. `manager` starts a room for each duty when this replica leads: `settle`, `retry`, `violations`,
`garbage` and `extender`. The rooms share the watches in `pods` and `claims`, and the queues of `workqueue`.
"""
