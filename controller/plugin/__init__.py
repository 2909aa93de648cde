"""The kubectl plugin `kubectl gpuquota`: `cli` is the command, `explain` tries whether a manifest is admitted."""
