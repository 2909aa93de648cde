"""ResourceClaims (Dynamic Resource Allocation): the cluster's devices, the charge of a claim, and its GPU model."""
