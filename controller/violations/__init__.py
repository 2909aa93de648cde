"""Finds pods that hold GPUs beyond the quota: `violations` finds them, `violation_watcher` reports and evicts them."""
