"""ResourceClaims (Dynamic Resource Allocation): the cluster's devices, and the charge and the pin of a claim."""
