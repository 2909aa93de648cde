"""Stored pods and claims: their charges, their cards, and the allocations that schedulers write on them.

An allocation is a set of annotations and labels by which a scheduler records the cards that it chose for a pod.
"""
