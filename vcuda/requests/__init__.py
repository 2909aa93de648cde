"""Reads the GPU requests of pods. A scheme is the set of resource names by which pods request one vendor's GPUs."""
