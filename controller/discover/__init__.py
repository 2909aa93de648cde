"""Discovers the GPU models of nodes, labels the nodes with them, and reports nodes whose model is in doubt."""
