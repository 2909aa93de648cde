"""The ways in which pods request GPUs: the schemes of vendors, and the request of one pod."""
