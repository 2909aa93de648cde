"""Settles the ledgers by the stored pods and claims, and publishes usage.

`settler` recounts a ledger, `charge_ages` says which charges have expired, `publisher` writes the usage of a namespace,
and `labels` marks the namespaces without a limit.
"""
