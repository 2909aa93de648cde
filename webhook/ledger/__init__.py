"""Charges GPU quota in the ledgers of namespaces.

A ledger records the GPU quota that the pods and claims of one namespace take. `ledgers` has the interface, and ledgers
in memory. `cluster_ledgers` has the ledgers of a cluster, and `namespace_ledger` the ledger of one namespace. A replica
reserves quota in advance and admits charges from it (`leases`), or writes charges together (`batches`). `recount`
counts the stored pods before a charge is refused.
"""
