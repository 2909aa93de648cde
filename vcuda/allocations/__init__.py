"""Stored pods and claims: their charges, the allocations that schedulers write on them, and their cards."""
