"""Retries the creation of pods and claims that were rejected for quota, when quota is released.

`rejected` finds the rejected workloads. `retrier` makes their controllers create the pods again. `claim_retrier` makes
Kubernetes create ResourceClaims again.
"""
