"""Charges the ledger of a namespace.

A ledger records the GPU quota that the pods and claims of one namespace take. `ledgers` has the interface, and ledgers
in memory. `cluster_ledgers` has the ledgers of a cluster, and `namespace_ledger` the ledger of one namespace. A replica
admits a charge from its reservation (`leases`), or writes the charge together with other charges (`batches`). `recount`
lists the stored pods before a charge is refused.
"""
