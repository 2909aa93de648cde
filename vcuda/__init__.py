"""The shared domain: schemes, requests, quota, ledger, placement, and the client of the API server."""

__version__ = "0.1.0"
