"""How pods ask for GPUs: the vendors' schemes, and what one pod requests."""
