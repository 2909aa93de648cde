"""Measurements of the whole system and of its parts. They print figures, but no figure is checked.

``python -m bench --help`` lists the measurements.
"""
