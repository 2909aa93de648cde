"""The ledger, which records the charges to the quota of a namespace, and the reports of usage."""
