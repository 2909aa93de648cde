"""Finds the GPU models and nodes that a pod may use, and builds the JSON Patch that limits the pod to one model."""
