"""The kubectl plugin `kubectl gpuquota`. `cli` defines the commands, and `kubectl` sends their requests."""
