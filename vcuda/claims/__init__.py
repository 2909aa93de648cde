"""ResourceClaims (Dynamic Resource Allocation): the devices of the cluster, the charge of a claim, and its pin."""
