"""Cleans up: `stale_gc` removes annotations of stale GPU allocations, `node` removes directories of deleted pods."""
