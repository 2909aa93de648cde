"""Has refused workloads created again when quota is released.

`refused` finds the workloads, `retrier` has their controllers try again, `claim_retrier` those that wait for a claim.
"""
