"""How pods request GPUs: the vendors' schemes, and the request of one pod."""
