"""How long tests wait."""

PATIENT = 20.0
"""Seconds that a test waits for what must happen; all of it happens at once."""
