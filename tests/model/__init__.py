"""The rules of the ledger as a model, which is small enough to be explored completely: `python -m
tests.model --full`.
"""
