"""The kubectl plugin `kubectl gpuquota`. Module `cli` defines the commands, and `kubectl` sends their requests."""
