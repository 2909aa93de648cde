"""The timeout of tests."""

PATIENT = 20.0
"""A test fails if an expected result does not arrive in this many seconds. Normally, results arrive at once."""
