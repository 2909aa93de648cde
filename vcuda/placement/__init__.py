"""Finds the models and nodes that a pod may use, and builds the patch that pins the pod to a model."""
