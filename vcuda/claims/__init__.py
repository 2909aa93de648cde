"""ResourceClaims (Dynamic Resource Allocation): the devices there are, what a claim takes, and its pin to one model."""
