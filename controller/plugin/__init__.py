"""The kubectl plugin `kubectl gpuquota`. Module `cli` has the commands. Module `kubectl` sends their requests."""
