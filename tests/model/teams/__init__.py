"""A model of team ledgers: several namespaces share a ledger, and edits of the quota document move their parts."""
