"""The kubectl plugin: `cli` is `kubectl gpuquota`, `explain` its explanation of one workload."""
