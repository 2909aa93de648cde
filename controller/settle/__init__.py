"""Settles the ledgers by the stored pods and claims, and publishes usage.

A ledger stores the charges of one namespace. `settler` recounts a ledger, `charge_ages` finds expired charges,
`publisher` writes the usage of a namespace, and `labels` marks the namespaces without a limit.
"""
