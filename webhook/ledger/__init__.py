"""Charges GPU quota in the ledgers of namespaces.

A ledger records the GPU quota that the pods and claims of one namespace use. `charging` has the interface. `ledgers`
has the ledgers of a cluster and ledgers in memory, and `namespace_ledger` the ledger of one namespace. A webhook
replica may reserve quota in advance, and admit charges from it (`reservations`). All other charges that wait at the
same time are written together (`batches`). Before a replica rejects a charge, `fresh_count` counts the stored pods.
"""
