"""Retries the creation of pods and claims that were refused for quota, when quota is released.

`refused` finds the refused workloads. `retrier` makes their controllers create the pods again. `claim_retrier` makes
Kubernetes create ResourceClaims again.
"""
