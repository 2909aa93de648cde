"""The code that all components share: GPU requests, quota, ledgers, placement, and the client of the API server."""

__version__ = "0.1.0"
