"""Measurements of the whole system and of its parts. They print figures and assert nothing.

``python -m bench --help`` lists the measurements.
"""
