"""The shared domain: schemes, requests, quota, ledger, placement, and the one way to the API server."""

__version__ = "0.1.0"
