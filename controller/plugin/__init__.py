"""The kubectl plugin `kubectl gpuquota`: `cli` is the command, `explain` tests whether a manifest is admitted."""
