"""Finds pods that hold GPUs beyond the quota: `violations` judges them, `violation_watcher` reports and evicts them."""
