"""Cleans up: `stale_gc` removes stale annotations of GPU allocations, `node` the directories of deleted pods."""
