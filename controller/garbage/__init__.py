"""Removes what deleted pods leave behind: `stale_gc` the allocation annotations, `node` the directories on a node."""
