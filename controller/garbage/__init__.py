"""Garbage collection: `stale_gc` removes stale GPU allocations, and `node` removes directories of deleted pods."""
