"""How long tests wait."""

PATIENT = 20.0
"""Seconds that a test waits for an expected result, all of which arrive at once."""
