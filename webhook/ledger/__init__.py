"""Charges the ledger of a namespace.

`ledgers` has the interface and the ledgers in memory, `cluster_ledgers` those of a cluster, `namespace_ledger` one of
these. A charge is granted from this replica's reservation (`leases`), or written together with others (`batches`).
`recount` lists the pods before a charge is refused.
"""
