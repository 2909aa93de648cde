"""Discovers the GPU models of nodes, labels the nodes, and reports doubts."""
