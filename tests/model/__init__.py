"""A model of the ledger's rules, small enough to explore every state: `python -m tests.model --full`."""
