"""Retries refused workloads when quota is released.

`refused` finds the workloads. `retrier` makes their controllers retry. `claim_retrier` retries pods that wait for a
claim.
"""
