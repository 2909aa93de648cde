"""Cleans up: `stale_gc` removes stale allocation annotations, `node` removes the directories of deleted pods."""
