"""Charges the ledger of a namespace.

`ledgers` has the interface and the ledgers in memory, `ledger_client` those of a cluster. A charge is granted from this
replica's reservation (`leases`), or written together with others (`batches`). `recount` lists the pods before a
charge is refused.
"""
