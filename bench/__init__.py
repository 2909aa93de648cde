"""Benchmarks of vcuda quota as a whole and of its parts. They print the measured values, and check none of them.

``python -m bench --help`` lists the benchmarks.
"""
