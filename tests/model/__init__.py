"""The ledger's rules as a model small enough to be explored to its end: `python -m tests.model --full`."""
