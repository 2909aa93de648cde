"""A model of team ledgers. Several namespaces share a ledger, and edits of the quota move their parts of ledgers."""
