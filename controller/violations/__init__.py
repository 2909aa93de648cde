"""Finds pods and claims beyond the GPU quota (`violations`), reports them, and evicts pods (`violation_watcher`)."""
